"""A contestant in another process: its driver is started, asked, kept still between turns, and ended.

Owns: the process and its side of the wire (`drivers/main.py`). Must not know: what a driver drives, clocks.
Invariant: between two calls no thread of the process group runs, so engines that wait actively do not slow the one
whose turn it is; after `close` none is left.
"""

import base64
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from izh.bench.contestants import deal
from izh.errors import IzhError

_MAIN = Path(__file__).parent / "drivers" / "main.py"
_END_S = 10.0
_DROPPED = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"})  # they would lead a peer to our packages


class PeerError(IzhError):
    """A contestant could not be started, or did not answer as asked. The process is ended."""

    def __init__(self, remote: "Remote", why: str) -> None:
        super().__init__(f"{remote.name}: {why}")
        self.remote = remote
        self.why = why


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a driver is told to load; drivers take what concerns them. `max_len` tokens of prompt and answer."""

    model: str
    dtype: str
    num_threads: int
    max_batch: int = 1
    max_len: int = 0
    kv_gib: float = 0.0
    adapters: Sequence[str] = ()
    rank: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


class Remote:
    """A started driver. Each call must be answered within `limit_s`."""

    def __init__(self, name: str, python: Path, driver: Path, limit_s: float, path: Path | None = None) -> None:
        """`path`: where this one finds modules besides its own environment's."""
        self.name = name
        self._limit_s = limit_s
        self._num_adapters = 0
        self._unread = b""
        environment = {key: value for key, value in os.environ.items() if key not in _DROPPED} | {"HF_HUB_OFFLINE": "1"}
        if path is not None:
            environment["PYTHONPATH"] = str(path)
        self._log = TemporaryFile()  # noqa: SIM115  # open for as long as the process: `close` ends both
        self._process = subprocess.Popen(
            [python, "-P", _MAIN, driver],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )

    def load(self, load: Load) -> None:
        """Once, first. Raises PeerError."""
        self._num_adapters = len(load.adapters)
        self.call("load", **asdict(load))

    def answer(self, prompts: list[list[int]], num_tokens: int, turn: int = 0) -> list[list[int]]:
        """As `contestants.Contestant`. Raises PeerError, also for answers of another length."""
        dealt: Sequence[int | None] = [None] * len(prompts)
        if self._num_adapters:
            dealt = deal(self._num_adapters, len(prompts), turn)
        answers: list[list[int]] = self.call("answer", prompts=prompts, num_tokens=num_tokens, adapters=dealt)
        lengths = [len(answer) for answer in answers]
        if lengths != [num_tokens] * len(prompts):
            raise self._failed(f"answers of {sorted(set(lengths))} tokens, asked for {len(prompts)} of {num_tokens}")
        return answers

    def embed(self, texts: list[str]) -> np.ndarray:
        """Vectors [len(texts), D] float32. Raises PeerError."""
        packed = self.call("embed", texts=texts)
        vectors = np.frombuffer(base64.b64decode(packed["base64"]), "<f4").reshape(packed["shape"])
        if len(vectors) != len(texts):
            raise self._failed(f"{len(vectors)} vectors, asked for {len(texts)}")
        return vectors

    def call(self, name: str, **arguments: Any) -> Any:
        """One request and its reply; the process runs meanwhile, and only then. Raises PeerError."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"call": name, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed(self._last_words()) from None
        reply = json.loads(self._line())
        if "error" in reply:
            raise self._failed(reply["error"])
        self._signal(signal.SIGSTOP)
        return reply["answer"]

    def close(self) -> None:
        """End the process and all it started. May be called twice."""
        if self._log.closed:
            return  # the number of the process group may be another's by now
        self._signal(signal.SIGKILL)
        try:
            self._process.wait(_END_S)
        finally:
            for pipe in (self._process.stdin, self._process.stdout, self._log):
                assert pipe is not None
                with suppress(BrokenPipeError):  # a request that the process no longer took
                    pipe.close()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        source, end = self._process.stdout.fileno(), time.monotonic() + self._limit_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([source], [], [], max(end - time.monotonic(), 0))
            if not ready:
                raise self._failed(f"no answer within {self._limit_s:g} s (--limit-s)")
            piece = os.read(source, 1 << 20)
            if not piece:
                raise self._failed(self._last_words())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _failed(self, why: str) -> PeerError:
        self.close()
        return PeerError(self, why)

    def _last_words(self) -> str:
        """Of a process that ended by itself."""
        status = self._process.wait(_END_S)
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return f"ended with status {status}: {lines[-1] if lines else 'without a word'}"

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # already gone
            os.killpg(self._process.pid, number)  # its own group's leader: start_new_session
