"""Admission, ends and failures of the engine core, with a runner that computes nothing."""

from concurrent.futures import Future

import pytest

from izh.cache.blocks import BlockPool
from izh.cache.keys import BlockKeys
from izh.engine.core import EngineCore
from izh.errors import RequestError
from izh.request import Finish, Request, SamplingParams
from izh.schedule.scheduler import Limits, Scheduler
from izh.seams import Result


class CountingRunner:
    """Answers token 5 to every sequence whose end is reached; stops at max_tokens; fails when told to."""

    fail = False

    def run(self, plan):
        if self.fail:
            raise RuntimeError("the device caught fire")
        return [self.answer(chunk.sequence) for chunk in plan.chunks if chunk.reaches_end]

    def answer(self, sequence):
        last = sequence.num_generated + 1 == sequence.request.params.max_tokens
        return Result(sequence, token_ids=[5], finish=Finish(reason="length") if last else None)


class RecordingHead:
    def __init__(self):
        self.forgotten = []

    def forget(self, sequence):
        self.forgotten.append(sequence.id)


class RecordingGate:
    def __init__(self, refuse=None, expand=0, needs=None):
        self.refuse, self.expand, self.needs = refuse, expand, needs or {}
        self.prepared, self.opened, self.closed = [], [], []

    def prepare(self, sequence):
        self.prepared.append(sequence.id)
        return self.needs.get(sequence.id)

    def turn(self):
        pass

    def open(self, sequence):
        if sequence.id == self.refuse:
            raise RequestError("not today", "prompt")
        self.opened.append(sequence.id)
        sequence.token_ids += [1] * self.expand

    def key(self, sequence, start, stop):
        return ()

    def grant(self, chunk):
        return chunk.count

    def take(self, chunk):
        pass

    def close(self, sequence):
        self.closed.append(sequence.id)


def build(*gates, max_model_len=32, num_blocks=16, max_num_batched_tokens=16):
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens, block_size=4)
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(limits, pool, BlockKeys(4, b"m", lambda n: b"", [gate.key for gate in gates]), gates)
    runner, head = CountingRunner(), RecordingHead()
    core = EngineCore(scheduler, runner, gates, [head], max_model_len=max_model_len, vocab_size=100)
    return core, runner, head, pool


def request(name, tokens=(1, 2, 3), **params):
    return Request(
        id=name,
        prompt_token_ids=list(tokens),
        params=SamplingParams(**({"max_tokens": 4} | params)),
        arrival_s=0.0,
    )


def run(core):
    outputs = []
    while core.has_work:
        outputs += core.step()
    return outputs


def ends(outputs):
    return {output.request_id: output.finish for output in outputs if output.finish}


def test_each_request_ends_once_and_leaves_nothing():
    gate = RecordingGate()
    core, _, head, pool = build(gate)
    for name in "abc":
        core.add(request(name))
    outputs = run(core)
    assert ends(outputs) == dict.fromkeys("abc", Finish(reason="length"))
    assert sum(output.finish is not None for output in outputs) == 3
    assert sorted(head.forgotten) == sorted(gate.closed) == ["a", "b", "c"]
    assert pool.num_held == 0


@pytest.mark.parametrize(
    ("tokens", "params", "kind", "text"),
    [
        ((), {}, "RequestError", "empty"),
        ((1, 100), {}, "RequestError", "token id 100; the vocabulary is 0..99"),
        ((1, -1), {}, "RequestError", "token id -1"),
        (range(40), {"max_tokens": None}, "ContextLengthError", "40 tokens and with at least 1 token"),
        (
            range(30),
            {"max_tokens": 3},
            "ContextLengthError",
            "30 tokens and with max_tokens 3 exceeds the context of 32",
        ),
    ],
)
def test_impossible_requests_end_with_a_reason_and_hold_nothing(tokens, params, kind, text):
    gate = RecordingGate()
    core, _, _, pool = build(gate)
    core.add(request("bad", tokens, **params))
    finish = ends(run(core))["bad"]
    assert (finish.reason, finish.kind) == ("error", kind)
    assert text in finish.error
    assert gate.prepared == gate.closed
    assert pool.num_held == 0


def test_the_length_check_sees_what_a_gate_expanded():
    core, *_ = build(RecordingGate(expand=28))
    core.add(request("big", max_tokens=2))
    assert ends(run(core))["big"].kind == "ContextLengthError"


def test_a_later_gates_refusal_closes_the_earlier_ones():
    first, second = RecordingGate(), RecordingGate(refuse="a")
    core, *_ = build(first, second)
    core.add(request("a"))
    assert ends(run(core))["a"] == Finish(reason="error", error="not today", param="prompt", kind="RequestError")
    assert first.opened == first.closed == ["a"]
    assert (second.prepared, second.opened, second.closed) == (["a"], [], ["a"])


def test_a_request_waits_for_what_its_gates_need_while_others_run():
    needed = {name: Future() for name in ("late", "gone", "bad")}
    gate = RecordingGate(refuse="bad", needs=needed)
    core, _, _, pool = build(gate)
    for name in ("late", "gone", "bad", "now"):
        core.add(request(name, max_tokens=2))
    assert core.stats.num_waiting == 4
    outputs = core.step() + core.step() + core.step()
    assert ends(outputs) == {"now": Finish(reason="length")}
    core.add(request("late"))
    assert "already running" in ends(core.step())["late"].error
    core.abort("gone")
    for future in needed.values():
        future.set_result(None)
    outputs = run(core)
    assert {name: finish.reason for name, finish in ends(outputs).items()} == {
        "gone": "abort",
        "bad": "error",
        "late": "length",
    }
    assert sorted(gate.closed) == sorted(gate.prepared) == ["bad", "gone", "late", "now"]
    assert "gone" not in gate.opened
    assert pool.num_held == 0


def test_a_live_id_is_refused_and_the_first_goes_on():
    core, *_ = build()
    core.add(request("a"))
    core.add(request("a"))
    outputs = run(core)
    assert [output.finish.reason for output in outputs if output.finish] == ["error", "length"]


def test_a_failing_step_ends_its_own_sequences_and_no_others():
    core, runner, head, pool = build(max_num_batched_tokens=4)
    core.add(request("running", range(4)))
    core.add(request("waiting", range(50, 54)))
    runner.fail = True
    outputs = core.step()
    runner.fail = False
    assert ends(outputs)["running"].error == "the step failed: the device caught fire"
    assert ends(run(core)) == {"waiting": Finish(reason="length")}
    assert sorted(head.forgotten) == ["running", "waiting"]
    assert pool.num_held == 0


def test_abort_ends_in_the_queue_in_prefill_and_in_decode():
    core, _, _, pool = build(max_num_batched_tokens=4)
    core.add(request("decoding", (1,)))
    core.step()
    core.add(request("prefilling", range(20)))
    core.step()
    core.add(request("queued", range(60, 70)))
    for name in ("decoding", "prefilling", "queued", "unknown"):
        core.abort(name)
    assert ends(core.step()) == dict.fromkeys(("decoding", "prefilling", "queued"), Finish(reason="abort"))
    assert not core.has_work
    assert pool.num_held == 0


def test_the_first_output_tells_queue_time_and_cached_tokens():
    core, *_ = build()
    core.add(request("a", range(9), max_tokens=1))
    run(core)
    core.add(request("b", range(9), max_tokens=2))
    first, second = run(core)
    assert first.num_cached_tokens == 8
    assert first.queue_s >= 0.0
    assert second.queue_s is None
