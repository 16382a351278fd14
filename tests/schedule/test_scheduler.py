"""The scheduler alone: order, budgets, sharing, preemption, and 10,000 random operations."""

import random

import pytest

from izh.cache.blocks import BlockPool
from izh.cache.keys import BlockKeys
from izh.request import Request, SamplingParams
from izh.schedule.scheduler import Limits, Scheduler
from izh.sequence import Sequence


class CountingGate:
    """Counts holds; grants at most `limit` tokens a chunk (0 holds everyone back)."""

    def __init__(self, limit=10**9):
        self.limit = limit
        self.held = {}
        self.closed = []

    def turn(self):
        pass

    def open(self, sequence):
        self.held[sequence.id] = 0

    def key(self, sequence, start, stop):
        return ()

    def grant(self, chunk):
        return min(chunk.count, self.limit)

    def take(self, chunk):
        assert chunk.count <= self.limit
        self.held[chunk.sequence.id] += chunk.count

    def close(self, sequence):
        self.closed.append(sequence.id)
        del self.held[sequence.id]


def build(num_blocks=64, gate=None, **limits):
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 4} | limits
    pool = BlockPool(num_blocks)
    keys = BlockKeys(options["block_size"], b"m", lambda n: b"", [gate.key] if gate else [])
    return Scheduler(Limits(**options), pool, keys, (gate,) if gate else ()), pool


def add(scheduler, name, tokens, *, arrival=0.0, priority=0, gate=None, **params):
    sequence = Sequence(
        Request(
            id=name,
            prompt_token_ids=list(tokens),
            params=SamplingParams(**params),
            arrival_s=arrival,
            priority=priority,
        )
    )
    if gate is not None:
        gate.open(sequence)
    scheduler.add(sequence)
    return sequence


def step(scheduler, token=lambda sequence: 1):
    """Plan, pretend to compute, commit, append one token to every sequence whose end was reached."""
    plan = scheduler.plan()
    scheduler.check()
    assert plan.num_tokens <= scheduler.limits.max_num_batched_tokens
    scheduler.commit(plan)
    for chunk in plan.chunks:
        if chunk.reaches_end:
            chunk.sequence.token_ids.append(token(chunk.sequence))
    scheduler.check()
    return [(chunk.sequence.id, chunk.start, chunk.count) for chunk in plan.chunks]


def test_a_long_prompt_is_computed_in_chunks_beside_decodes():
    scheduler, _ = build(max_num_batched_tokens=10)
    add(scheduler, "short", range(3))
    add(scheduler, "long", range(100, 125))
    assert step(scheduler) == [("short", 0, 3), ("long", 0, 7)]
    assert step(scheduler) == [("short", 3, 1), ("long", 7, 9)]
    assert step(scheduler) == [("short", 4, 1), ("long", 16, 9)]
    assert step(scheduler) == [("short", 5, 1), ("long", 25, 1)]


def test_an_older_long_prompt_does_not_starve_decodes():
    scheduler, _ = build(max_num_batched_tokens=8)
    add(scheduler, "young", range(3), arrival=1.0)
    assert step(scheduler) == [("young", 0, 3)]
    add(scheduler, "old", range(50, 90), arrival=0.0)
    step(scheduler)
    for _ in range(3):
        assert {name: count for name, _, count in step(scheduler)} == {"old": 7, "young": 1}


def test_a_full_prefix_hit_recomputes_just_the_last_token():
    scheduler, _ = build()
    first = add(scheduler, "a", range(8))
    step(scheduler)
    scheduler.close(first)
    again = add(scheduler, "b", range(8))
    assert step(scheduler) == [("b", 7, 1)]
    assert again.num_cached == 8


def test_a_prefix_hit_computes_only_what_differs():
    scheduler, _ = build()
    add(scheduler, "a", range(10))
    step(scheduler)
    add(scheduler, "b", [*range(8), 77, 78])
    assert ("b", 8, 2) in step(scheduler)


def test_prompt_logprobs_read_no_hit():
    scheduler, _ = build()
    add(scheduler, "a", range(10))
    step(scheduler)
    add(scheduler, "b", range(10), prompt_logprobs=0)
    assert ("b", 0, 10) in step(scheduler)


def test_prefix_caching_can_be_off():
    scheduler, _ = build(prefix_caching=False)
    add(scheduler, "a", range(10))
    add(scheduler, "b", range(10))
    assert step(scheduler) == [("a", 0, 10), ("b", 0, 10)]


def test_twins_that_arrive_together_share_the_first_ones_prompt():
    scheduler, pool = build()
    for name in "abc":
        add(scheduler, name, range(10))
    assert step(scheduler) == [("a", 0, 10)]
    assert step(scheduler) == [("a", 10, 1), ("b", 8, 2), ("c", 8, 2)]
    assert pool.num_held == 2 + 3 * 1


def test_those_who_wait_for_a_block_in_the_making_do_not_hold_up_others():
    scheduler, _ = build()
    add(scheduler, "a", range(10))
    add(scheduler, "twin", range(10))
    add(scheduler, "other", range(50, 55))
    assert step(scheduler) == [("a", 0, 10), ("other", 0, 5)]


def test_a_block_in_the_making_is_waited_for_no_longer_once_its_maker_is_gone():
    scheduler, _ = build(max_num_batched_tokens=8)
    maker = add(scheduler, "a", range(20))
    add(scheduler, "b", range(20))
    step(scheduler)
    scheduler.close(maker)
    assert step(scheduler) == [("b", 8, 8)]


def test_rank_is_arrival_shifted_by_priority():
    scheduler, _ = build(max_num_seqs=1, priority_step_s=10.0)
    add(scheduler, "plain", range(3), arrival=5.0)
    add(scheduler, "urgent", range(10, 13), arrival=8.0, priority=-1)
    add(scheduler, "idle", range(20, 23), arrival=0.0, priority=1)
    order = []
    for _ in range(3):
        (name, _, _), *rest = step(scheduler)
        assert not rest
        order.append(name)
        scheduler.close(scheduler.get(name))
    assert order == ["urgent", "plain", "idle"]


def test_an_old_request_of_low_priority_goes_before_newer_urgent_ones_in_time():
    scheduler, _ = build(max_num_seqs=1, priority_step_s=10.0)
    add(scheduler, "patient", range(3), arrival=0.0, priority=5)
    served = []
    for second in range(80):
        add(scheduler, f"urgent{second}", [second, 1, 2], arrival=float(second), priority=0)
        (name, _, _), *_ = step(scheduler)
        served.append(name)
        scheduler.close(scheduler.get(name))
    assert served.index("patient") == 50


def test_the_youngest_is_preempted_and_resumes_where_its_cached_blocks_end():
    scheduler, pool = build(num_blocks=6)
    old = add(scheduler, "old", range(8), arrival=0.0)
    young = add(scheduler, "young", range(50, 58), arrival=1.0)
    step(scheduler)  # both prompts: 2 blocks each
    step(scheduler)  # both grow to 3 blocks: the pool is full
    for _ in range(3):
        step(scheduler)
    assert old.num_tokens == young.num_tokens == 13
    chunks = step(scheduler)
    assert [name for name, _, _ in chunks] == ["old"]
    assert scheduler.counts.num_preempted == 1
    assert young.blocks == []
    assert young.num_tokens == 13
    scheduler.close(old)
    name, start, count = step(scheduler)[0]
    assert (name, start + count) == ("young", 13)
    assert start > 0
    assert pool.num_held == 4


def test_a_waiting_giant_is_not_overtaken_for_memory():
    scheduler, _ = build(num_blocks=8, max_num_batched_tokens=64)
    first = add(scheduler, "first", range(16))
    step(scheduler)
    add(scheduler, "giant", range(100, 124))
    add(scheduler, "small", range(200, 203))
    assert [name for name, _, _ in step(scheduler)] == ["first"]
    scheduler.close(first)
    assert [name for name, _, _ in step(scheduler)] == ["giant", "small"]


def test_gates_hold_back_without_blocking_others_and_close_once():
    class Picky(CountingGate):
        def grant(self, chunk):
            return 0 if chunk.sequence.id == "held" else chunk.count

    gate = Picky()
    scheduler, _ = build(gate=gate)
    held = add(scheduler, "held", range(5), gate=gate)
    free = add(scheduler, "free", range(20, 25), gate=gate)
    assert step(scheduler) == [("free", 0, 5)]
    scheduler.close(held)
    scheduler.close(free)
    assert gate.closed == ["held", "free"]
    assert gate.held == {}


def test_a_gate_may_shorten_a_chunk():
    gate = CountingGate(limit=3)
    scheduler, _ = build(gate=gate)
    add(scheduler, "a", range(7), gate=gate)
    assert step(scheduler) == [("a", 0, 3)]
    assert step(scheduler) == [("a", 3, 3)]
    assert step(scheduler) == [("a", 6, 1)]


def test_a_live_id_cannot_be_added_twice():
    scheduler, _ = build()
    add(scheduler, "a", range(3))
    with pytest.raises(AssertionError, match="already live"):
        add(scheduler, "a", range(3))


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_keep_every_invariant(seed):
    """2,500 random operations for each of 4 seeds: arrivals with shared prefixes, steps, aborts, resets, failures."""
    rng = random.Random(seed)
    gate = CountingGate(limit=rng.choice([3, 10**9]))
    num_blocks = rng.choice([14, 40])
    scheduler, pool = build(
        num_blocks=num_blocks,
        gate=gate,
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=rng.choice([8, 32]),
        prefix_caching=rng.random() < 0.8,
    )
    content = {}  # block id -> the tokens (whole prefix) whose KV was last written there
    prefixes = [[rng.randrange(9) for _ in range(24)] for _ in range(3)]
    ended = set()
    num_added = 0
    for operation in range(2500):
        kind = rng.random()
        if kind < 0.25 and len(scheduler.live) < 20:
            tokens = rng.choice(prefixes)[: rng.randrange(1, 25)] + [rng.randrange(9) for _ in range(rng.randrange(5))]
            add(
                scheduler,
                f"r{num_added}",
                tokens,
                arrival=operation,
                priority=rng.randrange(-2, 3),
                gate=gate,
                prompt_logprobs=0 if rng.random() < 0.1 else None,
            )
            num_added += 1
        elif kind < 0.32 and scheduler.live:
            victim = rng.choice(scheduler.live)
            scheduler.close(victim)
            ended.add(victim.id)
        elif kind < 0.33:
            scheduler.reset_prefix_cache()
        else:
            plan = scheduler.plan()
            scheduler.check()
            assert plan.num_tokens <= scheduler.limits.max_num_batched_tokens
            assert len({chunk.sequence.id for chunk in plan.chunks}) == len(plan.chunks)
            if scheduler.live and not plan.preempted:
                assert plan.chunks, "work exists and memory too, yet nothing was planned"
            for chunk in plan.chunks:
                sequence = chunk.sequence
                assert chunk.start == sequence.num_computed
                assert chunk.count >= 1
                if chunk.start == 0 or sequence.num_cached:  # a cached block must hold what its key says
                    for index in range(sequence.num_cached // 4):
                        assert content[sequence.blocks[index]] == sequence.token_ids[: 4 * index + 4]
            if rng.random() < 0.03:  # the step failed: its sequences end, nothing was computed
                for chunk in plan.chunks:
                    scheduler.close(chunk.sequence)
                    ended.add(chunk.sequence.id)
                scheduler.check()
                continue
            for chunk in plan.chunks:
                sequence = chunk.sequence
                for position in range(max(chunk.start, sequence.num_cached), chunk.stop):
                    if position % 4 == 3:
                        content[sequence.blocks[position // 4]] = sequence.token_ids[: position + 1]
            scheduler.commit(plan)
            for chunk in plan.chunks:
                sequence = chunk.sequence
                if chunk.reaches_end:
                    sequence.token_ids.append(rng.randrange(9))
                    if sequence.num_tokens > 40 or rng.random() < 0.1:
                        scheduler.close(sequence)
                        ended.add(sequence.id)
        scheduler.check()
    for sequence in scheduler.live:
        scheduler.close(sequence)
        ended.add(sequence.id)
    scheduler.check()
    assert pool.num_free == num_blocks
    assert gate.held == {}
    assert sorted(gate.closed) == sorted(ended)
    assert len(ended) == num_added
