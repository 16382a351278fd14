"""Encoders beside the generator take turns, in bounded pieces, and every call gets one reply."""

import pytest

from izh.engine.encoders import Encoders
from izh.engine.messages import Encode
from izh.errors import RequestError
from izh.request import Entry


class Counting:
    """Answers an entry with its number of tokens, and notes the batches; fails where token 0 is."""

    def __init__(self):
        self.batches = []

    def __call__(self, entries):
        self.batches.append([len(entry.ids) for entry in entries])
        if any(0 in entry.ids for entry in entries):
            raise RequestError("no such token")
        return [len(entry.ids).to_bytes(4, "little") for entry in entries]


def call(call_id, *lengths, encoder="embed", token=7):
    return Encode(call_id=call_id, encoder=encoder, entries=[Entry([token] * length) for length in lengths])


def drain(encoders, max_tokens):
    replies = []
    while encoders.is_busy:
        replies += encoders.turn(max_tokens)
    return replies


def lengths(reply):
    assert reply.error is None
    return [int.from_bytes(each, "little") for each in reply.results]


def test_a_turn_is_bounded_and_the_results_are_in_order():
    compute = Counting()
    encoders = Encoders({"embed": compute})
    encoders.add(call(1, 5, 5, 5, 30, 2, 8, 1))
    (reply,) = drain(encoders, 11)
    assert compute.batches == [[5, 5], [5], [30], [2, 8, 1]], "one that is longer than a turn is a turn alone"
    assert (reply.call_id, lengths(reply)) == (1, [5, 5, 5, 30, 2, 8, 1])
    assert not encoders.is_busy
    assert encoders.turn(11) == []


def test_a_short_call_does_not_wait_for_a_long_one():
    embed, rerank = Counting(), Counting()
    encoders = Encoders({"embed": embed, "rerank": rerank})
    encoders.add(call(1, *[10] * 20))
    encoders.add(call(2, 10, encoder="rerank"))
    assert encoders.turn(10) == []
    assert [reply.call_id for reply in encoders.turn(10)] == [2]
    assert rerank.batches == [[10]]
    assert [reply.call_id for reply in drain(encoders, 10)] == [1]


def test_a_call_that_fails_fails_alone():
    encoders = Encoders({"embed": Counting()})
    encoders.add(call(1, 4, 4))
    encoders.add(call(2, 4, 4, token=0))
    replies = {reply.call_id: reply for reply in drain(encoders, 4)}
    assert lengths(replies[1]) == [4, 4]
    assert (replies[2].results, replies[2].kind, "no such token" in replies[2].error) == ([], "RequestError", True)


def test_a_call_of_an_encoder_that_is_not_there_is_our_own_mistake():
    with pytest.raises(AssertionError, match="rerank"):
        Encoders({"embed": Counting()}).add(call(1, 3, encoder="rerank"))


class Clock:
    """A time that only computing takes: 1 second a token."""

    def __init__(self):
        self.now_s = 0.0

    def compute(self, entries):
        self.now_s += sum(len(entry.ids) for entry in entries)
        return [b"" for _ in entries]


def busy(num_entries):
    """Encoders with calls of two kinds, each entry a turn alone that takes 300 s; and their clock."""
    clock = Clock()
    encoders = Encoders({"embed": clock.compute, "rerank": clock.compute}, lambda: clock.now_s)
    encoders.add(call(1, *[300] * num_entries))
    encoders.add(call(2, *[300] * num_entries, encoder="rerank"))
    return encoders, clock


@pytest.mark.parametrize("step_s", [10.0, 200.0, 300.0, 1000.0])
def test_turns_have_as_long_as_steps(step_s):
    encoders, clock = busy(1000)
    for num_steps in range(1, 201):
        before_s = clock.now_s
        assert list(encoders.after_step(step_s)) == []
        assert abs(clock.now_s - num_steps * step_s) <= 300, "the two are never further apart than a turn"
        assert clock.now_s - before_s <= step_s + 300


def test_what_turns_leave_unused_is_lost_to_them():
    encoders, clock = busy(100)
    idle = Encoders({}, lambda: clock.now_s)
    assert list(idle.after_step(500.0)) == []
    few, few_clock = busy(1)
    assert {reply.call_id for reply in few.after_step(10_000.0)} == {1, 2}
    few.add(call(3, *[300] * 100))
    list(few.after_step(10.0))
    assert few_clock.now_s == 900
    list(encoders.after_step(10.0))
    assert clock.now_s == 300


def test_a_debt_does_not_outlive_the_requests():
    encoders, clock = busy(100)
    list(encoders.after_step(1.0))
    list(encoders.while_idle())
    spent_s = clock.now_s
    assert spent_s == 300 + 6 * 300, "an idle turn holds more"
    list(encoders.after_step(1.0))
    assert clock.now_s == spent_s + 300


def test_a_reply_leaves_before_the_next_turn():
    encoders, clock = busy(1)
    replies = encoders.after_step(10_000.0)
    assert next(replies).call_id == 1
    assert clock.now_s == 300
