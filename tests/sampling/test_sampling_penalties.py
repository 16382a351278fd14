import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import edited
from transformers import RepetitionPenaltyLogitsProcessor

from izh.request import SamplingParams
from izh.sampling.penalties import TokenCounts, add_bias, forbid, has_penalties, penalize

V = 50
ids = st.lists(st.integers(0, V - 1), max_size=200)


def counted(prompt, generated, *, steps=1, counts_prompt=True):
    """Counts that were read in `steps` growing pieces."""
    counts = TokenCounts(prompt if counts_prompt else [], len(prompt), V)
    for i in range(steps + 1):
        counts.read([*prompt, *generated[: len(generated) * i // steps]])
    return counts


@given(prompt=ids, generated=ids, steps=st.integers(1, 9), counts_prompt=st.booleans())
def test_counts_are_those_of_a_full_recount(prompt, generated, steps, counts_prompt):
    counts = counted(prompt, generated, steps=steps, counts_prompt=counts_prompt)
    got = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert len(got) == len(counts.ids)
    assert got == {t: generated.count(t) for t in {*(prompt if counts_prompt else []), *generated}}


def test_counts_grow_beyond_their_first_room():
    generated = list(range(1000)) * 2
    counts = TokenCounts([], 1, 1000)
    for end in range(0, 2001, 100):
        counts.read([0, *generated[:end]])
    assert sorted(counts.ids.tolist()) == list(range(1000))
    assert set(counts.counts.tolist()) == {2.0}


def test_prompt_ids_outside_the_vocabulary_are_left_out():
    assert counted([1, V, -1, V + 7], [2]).ids.tolist() == [1, 2]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_is_what_transformers_computes(penalty):
    rng = np.random.default_rng(0)
    histories = rng.integers(0, V, (6, 30))
    logits = torch.from_numpy(rng.normal(size=(6, V)).astype(np.float32))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.from_numpy(histories), logits.clone())
    seen = [counted(row[:20].tolist(), row[20:].tolist()) for row in histories]
    penalize(logits, list(range(6)), seen, [SamplingParams(repetition_penalty=penalty)] * 6)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


@given(
    prompt=ids,
    generated=ids,
    repetition=st.sampled_from([1.0, 0.7, 1.2]),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
)
@settings(deadline=None)
def test_all_penalties_against_their_definition(prompt, generated, repetition, frequency, presence):
    params = SamplingParams(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
    logits = torch.linspace(-3, 3, 3 * V).view(3, V).contiguous()
    before = logits.clone()
    penalize(logits, [1], [counted(prompt, generated, counts_prompt=repetition != 1.0)], [params])
    torch.testing.assert_close(logits[[0, 2]], before[[0, 2]], rtol=0, atol=0)
    np.testing.assert_allclose(logits[1].numpy(), edited(before[1], params, prompt, generated), rtol=1e-5, atol=1e-5)


def test_each_edit_touches_its_own_row_and_ids():
    logits = torch.zeros(3, V)
    forbid(logits, [2], [np.array([4, 5])])
    add_bias(logits, [0, 2], [np.array([7]), np.array([5, 8])], [np.float32([1.5]), np.float32([2, -3])])
    expected = torch.zeros(3, V)
    expected[2, [4, 5]] = -torch.inf  # a bias does not bring a forbidden token back
    expected[0, 7] = 1.5
    expected[2, 8] = -3
    assert torch.equal(logits, expected)


def test_no_rows_change_nothing():
    logits = torch.ones(2, V)
    forbid(logits, [], [])
    add_bias(logits, [], [], [])
    penalize(logits, [], [], [])
    assert torch.equal(logits, torch.ones(2, V))


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_any_penalty_needs_counts(name):
    assert has_penalties(SamplingParams(**{name: 0.5}))
    assert not has_penalties(SamplingParams(logit_bias={1: 1.0}, min_tokens=3))
