"""What goes into a batch, who waits, who is dropped: the queue without a clock, the thread without sleeping."""

import threading
from concurrent.futures import Future

import pytest

from izh.errors import OverloadedError
from izh.pooling.batcher import Batcher, BatchQueue, Call

WAIT_S = 20  # how long a test waits for what must happen; it never waits for what must not


def call(name: str, *costs: int, arrival_s: float = 0.0) -> Call:
    return Call([f"{name}{i}" for i in range(len(costs))], costs, arrival_s)


def queue(*calls: Call, cost: int = 100, items: int = 100, queued: int = 10_000) -> BatchQueue:
    made = BatchQueue(cost, items, queued)
    for each in calls:
        made.add(each)
    return made


def names(work: list) -> list[str]:
    return [one.items[index] for one, index in work]


def test_calls_take_turns_so_a_short_one_does_not_wait_for_a_long_one() -> None:
    q = queue(call("a", *[40] * 5), call("b", 10), call("c", 10, 10))
    assert names(q.take()) == ["a0", "b0", "c0", "a1"]
    assert names(q.take()) == ["c1", "a2", "a3"]
    assert names(q.take()) == ["a4"]
    assert q.take() == []


def test_a_long_item_is_not_passed_over_by_short_ones() -> None:
    q = queue(call("a", 50), call("long", 90), call("b", 5))
    assert names(q.take()) == ["a0"]  # b0 would fit, but it came after
    q.add(call("c", 5))
    assert names(q.take()) == ["long0", "b0", "c0"]


def test_a_stream_of_short_calls_does_not_starve_a_long_one() -> None:
    long = call("long", *[60] * 4)
    q = queue(long)
    for step in range(4):
        for i in range(5):
            q.add(call(f"s{step}-{i}-", 10))
        assert long in [one for one, _ in q.take()]
    assert long.next == 4


def test_an_item_beyond_the_budget_goes_alone() -> None:
    q = queue(call("a", 500), call("b", 1))
    assert names(q.take()) == ["a0"]
    assert names(q.take()) == ["b0"]


def test_the_number_of_items_is_bounded_too() -> None:
    q = queue(call("a", 1, 1, 1, 1, 1), items=2)
    assert [len(q.take()) for _ in range(3)] == [2, 2, 1]


def test_a_full_queue_refuses_with_the_numbers_and_keeps_what_it_has() -> None:
    q = queue(call("a", 60, 30), queued=100)
    with pytest.raises(OverloadedError, match=r"90 tokens are waiting .* has 11; at most 100"):
        q.add(call("b", 11))
    q.add(call("c", 10))
    assert q.queued_cost == 100
    assert names(q.take()) == ["a0", "c0", "a1"]
    assert q.queued_cost == 0


def test_an_empty_queue_takes_any_call() -> None:
    assert names(queue(call("a", 500), queued=100).take()) == ["a0"]


def test_a_caller_who_left_is_dropped_before_anything_is_computed() -> None:
    gone, stays = call("gone", 10, 10), call("stays", 10)
    q = queue(gone, stays, queued=30)
    assert gone.future.cancel()
    q.add(call("more", 20))  # its room is free again
    assert names(q.take()) == ["stays0", "more0"]


def test_results_come_in_the_order_of_the_items() -> None:
    one = call("a", 1, 1, 1)
    for index in (2, 0, 1):
        assert not one.future.done()
        one.put(index, index * 10)
    assert one.future.result() == [0, 10, 20]


def test_a_caller_who_leaves_during_the_computation_is_no_error() -> None:
    one = call("a", 1)
    one.future.cancel()
    one.put(0, "late")
    one.fail(ValueError("late"))
    assert one.future.cancelled()


def test_a_batch_waits_for_company_only_so_long_and_not_when_it_is_full() -> None:
    q = queue(call("a", 10, arrival_s=5.0), call("b", 10, arrival_s=6.0), items=4)
    assert q.hold_s(now_s=5.0, most_s=2.0) == 2.0
    assert q.hold_s(now_s=6.5, most_s=2.0) == 0.5
    assert q.hold_s(now_s=7.0, most_s=2.0) == q.hold_s(now_s=70.0, most_s=2.0) == 0.0
    q.add(call("c", 80, arrival_s=6.0))
    assert q.hold_s(now_s=5.0, most_s=2.0) == 0.0  # the budget is full
    assert queue(call("d", 1, 1), items=2).hold_s(0.0, 2.0) == 0.0
    assert queue().hold_s(0.0, 2.0) == 0.0


class Worker:
    """A computation that the test lets through step by step, and that remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list] = []
        self.started = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def __call__(self, items: list) -> list:
        self.batches.append(items)
        self.started.release()
        assert self.go.acquire(timeout=WAIT_S)
        if "bad" in items:
            raise ZeroDivisionError(f"{items}")
        return [f"<{item}>" for item in items]

    def wait_started(self) -> None:
        assert self.started.acquire(timeout=WAIT_S)


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
def batcher(worker):
    made = Batcher(worker, BatchQueue(100, 100, 1000))
    yield made
    for _ in range(100):
        worker.go.release()
    made.close()


def test_what_arrives_during_a_step_is_computed_together_after_it(batcher, worker) -> None:
    first = batcher.submit(["a"], [1])
    worker.wait_started()
    others = [batcher.submit([name, name.upper()], [1, 1]) for name in "bcd"]
    worker.go.release()
    worker.go.release()
    assert first.result(WAIT_S) == ["<a>"]
    assert [other.result(WAIT_S) for other in others] == [["<b>", "<B>"], ["<c>", "<C>"], ["<d>", "<D>"]]
    assert worker.batches == [["a"], ["b", "c", "d", "B", "C", "D"]]


def test_a_cancelled_call_is_never_computed(batcher, worker) -> None:
    first = batcher.submit(["a"], [1])
    worker.wait_started()
    gone, stays = batcher.submit(["gone"], [1]), batcher.submit(["stays"], [1])
    gone.cancel()
    worker.go.release()
    worker.go.release()
    assert stays.result(WAIT_S) == ["<stays>"]
    assert first.done()
    assert worker.batches == [["a"], ["stays"]]


def test_only_the_call_at_fault_fails_and_the_thread_goes_on(batcher, worker) -> None:
    batcher.submit(["a"], [1])
    worker.wait_started()
    good, bad = batcher.submit(["good"], [1]), batcher.submit(["x", "bad"], [1, 1])
    for _ in range(5):
        worker.go.release()
    assert good.result(WAIT_S) == ["<good>"]
    with pytest.raises(ZeroDivisionError):
        bad.result(WAIT_S)
    assert batcher.submit(["after"], [1]).result(WAIT_S) == ["<after>"]


def test_overload_reaches_the_caller(batcher, worker) -> None:
    batcher.submit(["a"], [1])
    worker.wait_started()
    batcher.submit(["b"], [900])
    with pytest.raises(OverloadedError):
        batcher.submit(["c"], [200])


def test_held_work_goes_when_the_batch_is_full(worker) -> None:
    held = Batcher(worker, BatchQueue(100, 2, 1000), hold_s=3600.0)
    for _ in range(4):
        worker.go.release()
    first = held.submit(["a"], [1])
    second = held.submit(["b"], [1])
    assert (first.result(WAIT_S), second.result(WAIT_S)) == (["<a>"], ["<b>"])
    assert worker.batches == [["a", "b"]]
    waiting = held.submit(["c"], [1])
    held.close()
    with pytest.raises(RuntimeError, match="closed"):
        waiting.result(WAIT_S)
    with pytest.raises(RuntimeError, match="closed"):
        held.submit(["d"], [1])
    assert worker.batches == [["a", "b"]]


def test_held_work_goes_alone_after_its_time(worker) -> None:
    held = Batcher(worker, BatchQueue(100, 100, 1000), hold_s=0.001)
    worker.go.release()
    assert held.submit(["a"], [1]).result(WAIT_S) == ["<a>"]
    held.close()


def test_preparation_runs_in_the_computing_thread_and_its_failure_is_everyones() -> None:
    seen: list[int] = []
    prepared = Batcher(
        lambda items: [threading.get_ident() for _ in items],
        BatchQueue(100, 100, 1000),
        prepare=lambda: seen.append(threading.get_ident()),
    )
    assert prepared.submit(["a"], [1]).result(WAIT_S) == seen
    prepared.close()

    def fail() -> None:
        raise OSError("no threads")

    broken = Batcher(lambda items: items, BatchQueue(100, 100, 1000), prepare=fail)
    future: Future = broken.submit(["a"], [1])
    with pytest.raises(OSError, match="no threads"):
        future.result(WAIT_S)
    broken.close()
