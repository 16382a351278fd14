"""Work of many callers, computed together by one thread.

Owns: BatchQueue (what is waiting and what goes next; no threads, no clock) and Batcher (the thread).
Must not know: what an item is, beyond its cost.
Invariants: every call ends exactly once: with its results, an error, or because its caller left. Batches take one item
of each waiting call in turn and never pass over one that does not fit, so that neither a short call behind a long one
nor a long one among many short waits for more than one item of each other call.

    submit --OverloadedError--> caller
       │
       v            hold (at most hold_s, only while there is room in the batch)
    [call A: a1 a2 a3 ...]  ┐
    [call B: b1]            ├─ take ──> a1 b1 c1 a2 c2 ...  up to the budget ──> run ──> results to A, B, C
    [call C: c1 c2]         ┘                a call whose caller has left is dropped here
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from izh.errors import OverloadedError


@dataclass(eq=False)
class Call:
    """What one caller submitted. `next` is its first item not yet in a batch."""

    items: Sequence[Any]
    costs: Sequence[int]
    arrival_s: float
    future: Future[list[Any]] = field(default_factory=Future)
    next: int = 0
    results: dict[int, Any] = field(default_factory=dict)
    waiting_cost: int = field(init=False)

    def __post_init__(self) -> None:
        self.waiting_cost = sum(self.costs)

    @property
    def has_left(self) -> bool:
        """The caller has cancelled, or an item has failed: there is nobody to compute for."""
        return self.future.done()

    def put(self, index: int, result: Any) -> None:
        self.results[index] = result
        if len(self.results) == len(self.items):
            self._end(lambda: self.future.set_result([self.results[i] for i in range(len(self.items))]))

    def fail(self, error: BaseException) -> None:
        self._end(lambda: self.future.set_exception(error))

    def _end(self, end: Callable[[], None]) -> None:
        try:
            end()
        except InvalidStateError:
            assert self.future.done()  # the caller left meanwhile


Work = list[tuple[Call, int]]
"""A batch: items as (call, index in it)."""


class BatchQueue:
    """Waiting calls. Costs are in tokens."""

    def __init__(self, max_batch_cost: int, max_batch_items: int, max_queued_cost: int) -> None:
        self.max_batch_cost = max_batch_cost
        self.max_batch_items = max_batch_items
        self.max_queued_cost = max_queued_cost
        self._calls: deque[Call] = deque()

    @property
    def queued_cost(self) -> int:
        return sum(call.waiting_cost for call in self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        """Raises OverloadedError, with the numbers, when the queue has no room; an empty queue takes any call."""
        self._forget_those_who_left()
        queued, more = self.queued_cost, call.waiting_cost
        if self._calls and queued + more > self.max_queued_cost:
            raise OverloadedError(
                f"{queued} tokens are waiting to be computed and this request has {more}; at most "
                f"{self.max_queued_cost} may wait. Try again later"
            )
        self._calls.append(call)

    def hold_s(self, now_s: float, most_s: float) -> float:
        """How long the next batch may still wait for company: until its oldest call has waited `most_s`, and not at
        all when it is full. Pure."""
        items = sum(len(call.items) - call.next for call in self._calls)
        if not self._calls or items >= self.max_batch_items or self.queued_cost >= self.max_batch_cost:
            return 0.0
        return max(0.0, min(call.arrival_s for call in self._calls) + most_s - now_s)

    def take(self) -> Work:
        """The next batch: one item of each call in turn, up to the budget; at least one item if anyone is there."""
        self._forget_those_who_left()
        work: Work = []
        cost = 0
        while self._calls and len(work) < self.max_batch_items:
            call = self._calls[0]
            own = call.costs[call.next]
            if work and cost + own > self.max_batch_cost:
                break
            work.append((call, call.next))
            cost += own
            call.next += 1
            call.waiting_cost -= own
            self._calls.popleft()
            if call.next < len(call.items):
                self._calls.append(call)
        return work

    def drain(self) -> list[Call]:
        """All waiting calls, which are no longer waiting."""
        calls = list(self._calls)
        self._calls.clear()
        return calls

    def _forget_those_who_left(self) -> None:
        if any(call.has_left for call in self._calls):
            self._calls = deque(call for call in self._calls if not call.has_left)


class Batcher:
    """A BatchQueue with a thread that works it off. Safe to call from any thread and any event loop."""

    def __init__(
        self,
        run: Callable[[list[Any]], Sequence[Any]],
        queue: BatchQueue,
        hold_s: float = 0.0,
        prepare: Callable[[], None] | None = None,
        observe: Callable[[list[float], int], None] = lambda waits_s, cost: None,
    ) -> None:
        """`run(items)` gives one result per item, in order. `prepare` runs first, in the thread that will run.
        `observe(waits_s, cost)` is told of every batch: how long each call waited that begins with it, and its cost."""
        self._run = run
        self._queue = queue
        self._hold_s = hold_s
        self._prepare = prepare
        self._observe = observe
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, items: Sequence[Any], costs: Sequence[int]) -> Future[list[Any]]:
        """The results to come, in the order of the items; cancelling it drops what is not computed yet.

        Raises: OverloadedError. RuntimeError after `close`.
        """
        assert len(items) == len(costs) > 0
        call = Call(items, costs, time.monotonic())
        with self._changed:
            if self._is_closed:
                raise RuntimeError("this service is closed")
            self._queue.add(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="izh-pooling", daemon=True)
                self._thread.start()
            self._changed.notify()
        return call.future

    def close(self) -> None:
        """End the thread after the batch it is in; what still waits fails."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        try:
            if self._prepare is not None:
                self._prepare()
        except Exception as error:
            self._end(error)
            return
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or len(self._queue) > 0)
                while not self._is_closed and (left_s := self._queue.hold_s(time.monotonic(), self._hold_s)) > 0:
                    self._changed.wait(left_s)
                if self._is_closed:
                    break
                work = self._queue.take()
            if work:
                now_s = time.monotonic()
                waits_s = [now_s - call.arrival_s for call, index in work if index == 0]
                self._observe(waits_s, sum(call.costs[index] for call, index in work))
                self._compute(work)
        self._end(RuntimeError("this service was closed"))

    def _end(self, error: Exception) -> None:
        with self._changed:
            self._is_closed = True
            calls = self._queue.drain()
        for call in calls:
            call.fail(error)

    def _compute(self, work: Work) -> None:
        """A batch that fails is computed again call by call, so that only the call at fault fails."""
        try:
            results = self._run([call.items[index] for call, index in work])
            assert len(results) == len(work)
        except Exception as error:
            calls = {id(call): call for call, _ in work}
            if len(calls) == 1:
                work[0][0].fail(error)
                return
            for call in calls.values():
                self._compute([(owner, index) for owner, index in work if owner is call])
            return
        for (call, index), result in zip(work, results, strict=True):
            call.put(index, result)
