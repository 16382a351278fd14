"""Encoders beside the generator: their work is done between two steps, on the steps' thread.

Owns: Encoders: which calls wait, how much of them is computed at a time, the one reply to each, and their share of the
time while requests run: half of it, whatever a token costs here and there.
Must not know: what an encoder is (it is given functions), requests, sockets.
Invariants: every Encode gets one Encoded; calls take turns, so that a long one delays a short one by a turn at most.

    |--- step ---| turn | turn |--- step ---| turn |--- step ---| turn | turn | ...

One thread computes everything, with one pool of threads under it. Two pools, of two processes on the same cores, slow
each other down tenfold.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from izh.engine.messages import Encode, Encoded
from izh.errors import IzhError
from izh.request import Entry

Compute = Callable[[list[Entry]], list[bytes]]
"""What an encoder makes of each entry: float32, little-endian."""

TURN_TOKENS = 256
"""Tokens of a turn while requests run: what they may wait longer than their fair part for a token. MiniLM takes 18 ms
for so many on two cores, about as long as a step of the demo model takes. No entry is cut: a longer one is a turn
alone."""
IDLE_TURN_TOKENS = 2048
"""The same while no request runs: a turn ends all the same, to look for messages."""


@dataclass(slots=True)
class _Call:
    message: Encode
    results: list[bytes] = field(default_factory=list)

    def next(self, max_tokens: int) -> list[Entry]:
        """The next entries, of together at most `max_tokens` tokens; at least one."""
        left = self.message.entries[len(self.results) :]
        num_tokens = 0
        for count, entry in enumerate(left):
            num_tokens += len(entry.ids)
            if count and num_tokens > max_tokens:
                return left[:count]
        return left


class Encoders:
    """Works off calls, some of them at a time."""

    def __init__(self, computes: Mapping[str, Compute], clock: Callable[[], float] = time.perf_counter) -> None:
        """`computes` by the names that calls use. `clock` is in seconds."""
        self._computes = computes
        self._clock = clock
        self._calls: deque[_Call] = deque()
        self._left_s = 0.0  # of what the steps have taken, what the turns have not; below 0: they have had more

    @property
    def is_busy(self) -> bool:
        """True while a call has no reply yet."""
        return bool(self._calls)

    def add(self, message: Encode) -> None:
        """Take in a call."""
        assert message.encoder in self._computes, f"no encoder {message.encoder!r} was built"
        self._calls.append(_Call(message))

    def after_step(self, step_s: float) -> Iterator[Encoded]:
        """Take turns until they have had as long as the steps; each reply as it is made. The last step took `step_s`.
        What turns leave unused is lost to them; what one takes too long is taken off the next ones."""
        self._left_s = min(self._left_s, 0.0) + step_s
        while self._calls and self._left_s > 0:
            start_s = self._clock()
            replies = self.turn(TURN_TOKENS)
            self._left_s -= self._clock() - start_s
            yield from replies

    def while_idle(self) -> Iterator[Encoded]:
        """Take one turn, where nobody waits for a step."""
        self._left_s = 0.0
        yield from self.turn(IDLE_TURN_TOKENS)

    def turn(self, max_tokens: int) -> list[Encoded]:
        """Compute some of the call whose turn it is; the reply, if that was the last of it."""
        if not self._calls:
            return []
        call = self._calls.popleft()
        try:
            call.results += self._computes[call.message.encoder](call.next(max_tokens))
        except Exception as error:
            kind = type(error).__name__ if isinstance(error, IzhError) else "IzhError"
            return [Encoded(call_id=call.message.call_id, error=f"the encoder failed: {error}", kind=kind)]
        if len(call.results) < len(call.message.entries):
            self._calls.append(call)
            return []
        return [Encoded(call_id=call.message.call_id, results=call.results)]
