"""The wire between the benchmark and a peer, with real processes that answer as told."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_peer
import numpy as np
import psutil
import pytest

from izh.bench.peers.remote import Load, PeerError, Remote

DRIVER = Path(fake_peer.__file__)


def started(limit_s: float = 30, **options: Any) -> Remote:
    remote = Remote("fake", Path(sys.executable), DRIVER, limit_s)
    adapters = options.pop("adapters", ())
    remote.load(Load(model="m", dtype="fp32", num_threads=1, adapters=adapters, options=options))
    return remote


def wait_for(process: psutil.Process, status: str) -> None:
    """A signal takes its time to arrive."""
    end = time.monotonic() + 10
    while process.status() != status:
        assert time.monotonic() < end, f"{process.status()}, not {status}"
        time.sleep(0.01)


@pytest.fixture
def remote() -> Iterator[Remote]:
    one = started()
    yield one
    one.close()


def test_answers_come_whole_whatever_the_engine_prints(remote: Remote) -> None:
    assert remote.answer([[7, 8], [20, 21]], 3) == [[7, 8, 9], [20, 21, 22]]
    assert remote.answer([[1]], 1) == [[1]]


def test_vectors_come_as_they_were(remote: Remote) -> None:
    vectors = remote.embed(["a", "b"])
    assert vectors.dtype == np.float32
    assert vectors.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_adapters_are_dealt_out_as_everywhere() -> None:
    remote = started(adapters=("x", "y"))
    try:
        assert remote.answer([[0], [0], [0]], 1) == [[1000], [2000], [1000]]
    finally:
        remote.close()


def test_a_peer_keeps_still_between_turns_and_is_gone_after_the_last() -> None:
    remote = started()
    process = psutil.Process(remote.call("pid"))
    wait_for(process, psutil.STATUS_STOPPED)
    assert remote.answer([[1]], 1) == [[1]]
    wait_for(process, psutil.STATUS_STOPPED)
    remote.close()
    remote.close()
    assert not process.is_running()


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        ("raise", "RuntimeError: out of memory"),
        ("exit", "ended with status 3: Segmentation fault"),
        ("short", "answers of \\[1\\] tokens, asked for 1 of 2"),
    ],
)
def test_a_failure_says_why_and_ends_the_process(fails: str, why: str) -> None:
    remote = started(fails=fails)
    process = psutil.Process(remote.call("pid"))
    with pytest.raises(PeerError, match=f"fake: {why}") as raised:
        remote.answer([[1]], 2)
    assert raised.value.remote is remote
    assert not process.is_running()


def test_a_failing_load_says_why() -> None:
    with pytest.raises(PeerError, match=r"^fake: ValueError: no such model$"):
        started(fails="load")


def test_a_silent_peer_is_ended() -> None:
    remote = started(fails="hang")
    remote._limit_s = 0.3
    with pytest.raises(PeerError, match=r"no answer within 0.3 s \(--limit-s\)"):
        remote.answer([[1]], 2)


def test_a_driver_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    remote = Remote("fake", Path(sys.executable), tmp_path / "none.py", 30)
    with pytest.raises(PeerError, match="ended with status 1: FileNotFoundError"):
        remote.load(Load(model="m", dtype="fp32", num_threads=1))
