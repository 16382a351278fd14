"""Features cross the process queue whole, once for all choices, and are checked on arrival."""

import threading
import time

import engines
import numpy as np
import pytest
import tiny_checkpoint
import torch
from image_cases import HEAD_DIM, HIDDEN, features, prompt

from izh.engine.messages import Add, decode_to_engine, encode
from izh.errors import RequestError
from izh.model.source import resolve
from izh.multimodal import travel
from izh.multimodal.features import validate_features
from izh.multimodal.travel import Arrivals, pack
from izh.request import PackedFeatures, SamplingParams, choices_of
from izh.sequence import Sequence

FIELDS = ("width", "rows", "places", "positions", "delta", "sections")


@pytest.fixture
def made():
    return prompt(3, (1, 2, 3), 2, (2, 2, 1), 4)


def check(made, packed):
    return validate_features(packed, num_tokens=len(made.token_ids), hidden_size=HIDDEN, rotary_dim=HEAD_DIM)


def changed(packed, **fields):
    return PackedFeatures(**({name: getattr(packed, name) for name in FIELDS} | fields))


def test_packed_features_are_the_features(made):
    got, wanted = check(made, pack(made.features())), features(made)
    assert got.spans == wanted.spans
    for name in ("places", "rows", "positions"):
        array = getattr(got, name)
        assert np.array_equal(array, getattr(wanted, name))
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    assert (got.delta, got.sections) == (wanted.delta, wanted.sections)


def test_text_alone_and_numpy_and_half_precision_travel_too():
    plain = prompt(5)
    assert check(plain, pack(plain.features())).spans == ()
    made = prompt(1, (1, 2, 2))
    half = {place: row.bfloat16() for place, row in made.image_rows.items()}
    arrays = {place: row.float().numpy() for place, row in half.items()}
    one = pack(made.features() | {"image_rows": half})
    two = pack(made.features() | {"image_rows": arrays, "positions": made.positions.numpy(), "delta": np.int64(-2)})
    assert one == two


def test_choices_share_one_copy_on_the_way_and_one_check_at_the_end(made, monkeypatch):
    packed = pack(made.features())
    requests = choices_of("r", made.token_ids, SamplingParams(n=8), 0.0)
    frame = encode(Add(requests=requests, features=packed))
    assert frame.count(packed.rows) == 1
    arrived = decode_to_engine(frame)
    assert isinstance(arrived, Add)
    assert {id(request.features) for request in arrived.whole} == {id(arrived.features)}
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return validate_features(*args, **kwargs)

    monkeypatch.setattr(travel, "validate_features", counted)
    arrivals = Arrivals(HIDDEN, HEAD_DIM, torch.float32)
    waiting = [arrivals.features_of(Sequence(request)) for request in arrived.whole]
    got = [each.result() for each in waiting]
    assert len(calls) == 1
    assert all(each is got[0] for each in got)
    other = arrivals.features_of(Sequence(engines.request("other", made.token_ids)))
    assert other is None


def test_nothing_is_kept_after_the_last_sequence(made):
    arrivals = Arrivals(HIDDEN, HEAD_DIM, torch.float32)
    for _ in range(3):
        packed = pack(made.features())
        (request,) = choices_of("r", made.token_ids, SamplingParams(), 0.0, features=packed)
        got = arrivals.features_of(Sequence(request))
        assert arrivals.features_of(Sequence(request)) is got
        assert got.result().num_tokens == len(made.token_ids)
        del got, request, packed
        until(lambda: [each() for each in arrivals._last] == [None, None])


def until(condition, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_steps_thread_neither_checks_features_nor_waits_for_them(made, tmp_path, monkeypatch):
    """Others decode on while a request's features are being read; then it is answered."""
    may_check, threads = threading.Event(), []

    def slow(*args, **kwargs):
        threads.append(threading.current_thread())
        assert may_check.wait(10)
        return validate_features(*args, **kwargs)

    monkeypatch.setattr(travel, "validate_features", slow)
    loaded = engines.load(resolve(str(tiny_checkpoint.save_llama(tmp_path))), kernels="reference")
    engine = loaded.engine()
    engine.add(engines.request("text", [5, 6, 7], max_tokens=32))
    for request in choices_of(
        "image", made.token_ids, SamplingParams(n=2, max_tokens=4), 1.0, features=pack(made.features())
    ):
        engine.add(request)
    produced = sum(len(output.token_ids) for _ in range(8) for output in engine.step())
    assert produced == 8
    assert engine.stats.num_waiting == 2
    engine.add(engines.request("leaves", made.token_ids))
    engine.abort("image/1")
    may_check.set()
    done = engines.drain(engine)
    assert {name: output.finish.reason for name, output in done.items()} == {
        "text": "length",
        "image/0": "length",
        "image/1": "abort",
        "leaves": "length",
    }
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("rows", b"\0" * 7, "image_rows"),
        ("places", b"\0" * 7, "image_rows"),
        ("width", HIDDEN + 1, "image_rows"),
        ("width", HIDDEN // 2, "image_rows"),
        ("places", np.full(10, 3, "<i8").tobytes(), "image_rows"),
        ("places", np.arange(10, 20).astype("<i8").tobytes(), "image_rows"),
        ("places", np.arange(-1, 9).astype("<i8").tobytes(), "image_rows"),
        ("rows", np.full((10, HIDDEN), np.nan, "<f4").tobytes(), "image_rows"),
        ("positions", b"\0" * 8, "positions"),
        ("positions", np.zeros((3, 5), "<i8").tobytes(), "positions"),
        ("delta", 1, "delta"),
        ("sections", (1, 1, 1), "sections"),
    ],
)
def test_what_arrives_wrong_is_refused_by_name(made, field, value, param):
    with pytest.raises(RequestError) as caught:
        check(made, changed(pack(made.features()), **{field: value}))
    assert caught.value.param == f"features.{param}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image_rows", [torch.zeros(HIDDEN)]),
        ("image_rows", {"3": torch.zeros(HIDDEN)}),
        ("image_rows", {3: [0.0] * HIDDEN}),
        ("image_rows", {3: torch.zeros(2, HIDDEN)}),
        ("image_rows", {3: torch.zeros(HIDDEN, dtype=torch.int64)}),
        ("image_rows", {3: torch.zeros(HIDDEN), 4: torch.zeros(HIDDEN - 1)}),
        ("positions", [[0], [0], [0]]),
        ("positions", torch.zeros(3, 4)),
        ("positions", torch.zeros(4, 4, dtype=torch.int64)),
        ("delta", None),
        ("delta", True),
        ("sections", "xyz"),
        ("sections", (1, 2)),
    ],
)
def test_what_cannot_travel_is_refused_by_name(made, field, value):
    with pytest.raises(RequestError) as caught:
        pack(made.features() | {field: value})
    assert caught.value.param == f"features.{field}"
    with pytest.raises(RequestError, match="exactly the fields"):
        pack({"image_rows": {}})
