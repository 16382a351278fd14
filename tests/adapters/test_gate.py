"""Leases and slots under the real scheduler: fairness, sharing, preemption; random lives leave nothing held."""

import random
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby

import pytest

from izh.adapters.gate import TURN_STEPS, AdapterGate, Loan
from izh.adapters.slots import SlotTable
from izh.cache.blocks import BlockPool
from izh.cache.keys import BlockKeys
from izh.errors import NotFoundError
from izh.request import Request, SamplingParams
from izh.schedule.scheduler import Limits, Scheduler
from izh.sequence import Sequence


@dataclass(frozen=True)
class FakeWeights:
    digest: bytes


def build(capacity=2, num_blocks=200, max_num_seqs=8, prefix_caching=True):
    """The adapter of request "name:42" is "name"; "base:1" has none."""

    def find(sequence):
        name = sequence.id.split(":")[0]
        if name == "unknown":
            raise NotFoundError("no adapter 'unknown'", "model")
        if name == "base":
            return None
        weights = Future()
        weights.set_result(FakeWeights(name.encode()))
        return Loan(((name, name.encode()),), weights)

    slots = SlotTable(capacity)
    gate = AdapterGate(slots, find)
    limits = Limits(max_num_seqs=max_num_seqs, max_num_batched_tokens=64, block_size=4, prefix_caching=prefix_caching)
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(limits, pool, BlockKeys(4, b"m", lambda n: b"", [gate.key]), (gate,))
    return scheduler, gate, slots, pool


def add(scheduler, gate, name, tokens=(1, 2, 3), arrival=0.0):
    sequence = Sequence(Request(id=name, prompt_token_ids=list(tokens), params=SamplingParams(), arrival_s=arrival))
    assert gate.prepare(sequence) is None
    gate.open(sequence)
    scheduler.add(sequence)
    return sequence


def step(scheduler, gate, slots):
    plan = scheduler.plan()
    for chunk in plan.chunks:
        name = chunk.sequence.id.split(":")[0]
        slot = gate.slot(chunk.sequence)
        assert (slot is None) == (name == "base")
        if slot is not None:
            assert slots.digest(slot) == name.encode()
            assert slots.holds(slot) > 0
    scheduler.commit(plan)
    for chunk in plan.chunks:
        if chunk.reaches_end:
            chunk.sequence.token_ids.append(1)
    slots.check()
    scheduler.check()
    return [chunk.sequence.id for chunk in plan.chunks]


def test_more_adapters_than_slots_wait_by_age_and_base_rows_pass():
    scheduler, gate, slots, _ = build(capacity=2)
    for i, name in enumerate(["a:1", "b:1", "c:1", "base:1", "a:2"]):
        add(scheduler, gate, name, arrival=float(i))
    first = step(scheduler, gate, slots)
    assert first[:2] == ["a:1", "b:1"]
    assert "c:1" not in first
    assert "base:1" in first


def test_a_turn_is_over_when_others_wait_and_comes_again():
    scheduler, gate, slots, _ = build(capacity=1)
    add(scheduler, gate, "a:0")
    assert step(scheduler, gate, slots) == ["a:0"]
    add(scheduler, gate, "b:0", arrival=1.0)
    add(scheduler, gate, "c:0", arrival=2.0)
    add(scheduler, gate, "a:1", arrival=3.0)
    ran = [step(scheduler, gate, slots) for _ in range(4 * (TURN_STEPS + 1))]
    turns = [names for i, names in enumerate(ran) if i == 0 or names != ran[i - 1]]
    assert turns == [["a:0", "a:1"], ["b:0"], ["c:0"], ["a:0", "a:1"], ["b:0"]]
    assert max(len(list(same)) for _, same in groupby(ran)) == TURN_STEPS + 1


def test_a_paused_sequence_keeps_lease_and_kv():
    scheduler, gate, slots, _ = build(capacity=1)
    first = add(scheduler, gate, "a:0", range(6))
    for _ in range(TURN_STEPS + 1):
        step(scheduler, gate, slots)
    add(scheduler, gate, "b:0")
    num_computed, blocks = first.num_computed, list(first.blocks)
    assert step(scheduler, gate, slots) == ["b:0"]
    assert gate.slot(first) is None
    assert gate.num_live == 2
    assert (first.num_computed, first.blocks) == (num_computed, blocks)
    assert first.num_cached == 0


def test_only_as_many_slots_change_hands_as_are_needed():
    scheduler, gate, slots, _ = build(capacity=3)
    for name in ("a:1", "b:1", "d:1"):
        add(scheduler, gate, name)
        step(scheduler, gate, slots)
    for _ in range(TURN_STEPS):
        step(scheduler, gate, slots)
    add(scheduler, gate, "c:1", arrival=1.0)
    assert step(scheduler, gate, slots) == ["b:1", "d:1", "c:1"]  # a has had its slot for longest


def test_without_others_waiting_nobody_pauses():
    scheduler, gate, slots, _ = build(capacity=2)
    add(scheduler, gate, "a:1")
    add(scheduler, gate, "b:1")
    for _ in range(3 * TURN_STEPS):
        assert step(scheduler, gate, slots) == ["a:1", "b:1"]


def test_a_turn_that_cannot_be_used_goes_back():
    """All memory is held by the paused: the one offered the slot cannot start, and must not block who it waits for."""
    scheduler, gate, slots, _ = build(capacity=1, num_blocks=16)
    old = add(scheduler, gate, "a:1", range(9))
    for _ in range(TURN_STEPS + 1):
        step(scheduler, gate, slots)
    add(scheduler, gate, "b:1", range(40), arrival=1.0)
    ran = [step(scheduler, gate, slots) for _ in range(2 * TURN_STEPS)]
    assert ran.count([]) == 1, "the offer is repeated when something has changed, not at every turn"
    assert ran.count(["a:1"]) == 2 * TURN_STEPS - 1
    scheduler.close(old)
    assert step(scheduler, gate, slots) == ["b:1"]


def test_an_idle_adapter_stays_resident_until_its_slot_is_needed():
    scheduler, gate, slots, _ = build(capacity=2)
    for name in ("a:1", "b:1"):
        add(scheduler, gate, name)
    step(scheduler, gate, slots)
    for name in ("b:1", "a:1"):
        scheduler.close(scheduler.get(name))
    assert slots.find(b"a") is not None
    assert slots.find(b"b") is not None
    add(scheduler, gate, "c:1")
    step(scheduler, gate, slots)
    assert slots.find(b"b") is None, "the one unused for longest goes first"
    assert slots.find(b"a") is not None


def test_a_preempted_request_keeps_its_lease_and_slot():
    scheduler, gate, slots, _ = build(capacity=1, num_blocks=5)
    add(scheduler, gate, "a:old", range(8), arrival=0.0)
    young = add(scheduler, gate, "a:young", range(50, 58), arrival=1.0)
    for _ in range(6):
        step(scheduler, gate, slots)
    assert young.blocks == []
    assert gate.slot(young) == 0
    assert slots.holds(0) == 2


def test_an_unknown_adapter_is_refused_and_nothing_is_held():
    scheduler, gate, _, _ = build()
    with pytest.raises(NotFoundError):
        add(scheduler, gate, "unknown:1")
    assert gate.num_live == 0


def test_releasing_twice_is_a_bug_and_says_so():
    slots = SlotTable(1)
    slots.release(slots.take(b"a"))
    with pytest.raises(RuntimeError, match="released more often"):
        slots.release(0)


def test_blocks_are_shared_between_equal_weights_only():
    scheduler, gate, slots, _ = build()
    add(scheduler, gate, "a:1", range(8))
    step(scheduler, gate, slots)
    same, other, base = (add(scheduler, gate, name, range(8)) for name in ("a:2", "b:1", "base:1"))
    step(scheduler, gate, slots)
    assert same.num_cached == 8
    assert other.num_cached == base.num_cached == 0


@pytest.mark.parametrize("seed", range(5))
def test_random_lives_leave_no_lease_no_hold_and_no_block(seed):
    """200 requests each: aborted in the queue, in prefill or in decode, finished, preempted, failed with their step."""
    rng = random.Random(seed)
    scheduler, gate, slots, pool = build(
        capacity=rng.choice([1, 2, 4]), num_blocks=rng.choice([12, 60]), max_num_seqs=rng.choice([2, 8])
    )
    num_added = num_empty = 0
    for now in range(4000):
        kind = rng.random()
        if kind < 0.2 and num_added < 200:
            name = rng.choice(["base", "a", "b", "c", "d", "e", "f"])
            tokens = [rng.randrange(5) for _ in range(rng.randrange(1, 20))]
            add(scheduler, gate, f"{name}:{num_added}", tokens, arrival=float(now))
            num_added += 1
        elif kind < 0.23 and scheduler.live:
            scheduler.close(rng.choice(scheduler.live))
        else:
            plan = scheduler.plan()
            if rng.random() < 0.02:
                for chunk in plan.chunks:
                    scheduler.close(chunk.sequence)
                continue
            scheduler.commit(plan)
            for chunk in plan.chunks:
                if chunk.reaches_end:
                    chunk.sequence.token_ids.append(rng.randrange(5))
                    if chunk.sequence.num_tokens > 30 or rng.random() < 0.1:
                        scheduler.close(chunk.sequence)
            num_empty = 0 if plan.chunks or plan.preempted or not scheduler.live else num_empty + 1
            assert num_empty <= 6, (
                "work, and nothing planned for longer than offers can go to those who cannot use them"
            )
        scheduler.check()
        slots.check()
        assert slots.num_holds <= gate.num_live
        if num_added == 200 and not scheduler.live:
            break
    assert num_added == 200
    assert not scheduler.live
    assert gate.num_live == slots.num_holds == 0
    assert pool.num_held == 0
