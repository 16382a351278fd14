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
