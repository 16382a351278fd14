import ast
from pathlib import Path

import pytest
from sampling_reference import sequence

import izh.sampling.stop as stop
from izh.request import Finish

EOS = frozenset({2, 3})


def after(token, *, prompt=(5, 6), generated=(), max_model_len=100, **params):
    made = sequence(prompt, generated=generated, **params)
    return stop.finish_after(made, made.request.params, token, EOS, max_model_len)


@pytest.mark.parametrize("token", [2, 3])
def test_each_eos_stops_without_a_reason(token):
    assert after(token) == Finish(reason="stop")


def test_another_token_goes_on():
    assert after(7) is None


def test_ignore_eos_goes_on_unless_it_is_also_a_stop_id():
    assert after(2, ignore_eos=True) is None
    assert after(2, ignore_eos=True, stop_token_ids=(2,)) == Finish(reason="stop", stop_reason=2)
    assert after(2, stop_token_ids=(2,)) == Finish(reason="stop")


def test_a_stop_id_is_its_own_reason():
    assert after(9, stop_token_ids=(8, 9)) == Finish(reason="stop", stop_reason=9)


def test_max_tokens_counts_the_token_itself():
    assert after(7, generated=[7], max_tokens=3) is None
    assert after(7, generated=[7, 7], max_tokens=3) == Finish(reason="length")
    assert after(7, max_tokens=1) == Finish(reason="length")
    assert after(7, generated=[7] * 50, max_tokens=None) is None


def test_the_context_ends_when_it_is_full():
    assert after(7, prompt=[5] * 8, max_model_len=10) is None
    assert after(7, prompt=[5] * 9, max_model_len=10) == Finish(reason="length")


def test_a_stop_wins_over_a_length_reached_by_the_same_token():
    assert after(2, max_tokens=1) == Finish(reason="stop")


@pytest.mark.parametrize("token", [2, 9])
def test_nothing_stops_before_min_tokens(token):
    params = {"min_tokens": 3, "stop_token_ids": (9,), "max_tokens": 10}
    assert after(token, generated=[7], **params) is None
    assert after(token, generated=[7, 7], **params).reason == "stop"


def test_ending_ids_are_those_that_stop():
    params = sequence([1], stop_token_ids=(9,)).request.params
    assert stop.ending_ids(params, EOS) == {2, 3, 9}
    params = sequence([1], stop_token_ids=(9,), ignore_eos=True).request.params
    assert stop.ending_ids(params, EOS) == {9}


def test_the_rule_needs_no_torch():
    imports = [
        node for node in ast.walk(ast.parse(Path(stop.__file__).read_text())) if isinstance(node, ast.ImportFrom)
    ]
    assert {node.module for node in imports} == {"izh.request", "izh.sequence"}
