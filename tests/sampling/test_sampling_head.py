import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import EOS, edited, head, inverse_cdf, kept, last_token, sequence, step

import izh.sampling.head as head_module
from izh.kernels.reference import REFERENCE
from izh.request import Finish
from izh.sampling.uniform import Uniforms, stream_key
from izh.seams import HiddenRows
from izh.sequence import Chunk, Plan

V = 600
ASKS = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 20, "logprobs": 4},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.0, "logit_bias": {7: 3.0, 11: -100.0}, "logprobs": 0},
    {"temperature": 1.0, "min_tokens": 20, "stop_token_ids": (5, 6), "logit_bias": {EOS: 60.0, 5: 60.0}},
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": -0.3, "logprobs": 20},
]


def logits_of(*names, scale=3.0):
    """One row for each name, always the same for the same name."""
    return torch.stack([scale * torch.randn(V, generator=torch.Generator().manual_seed(name)) for name in names])


def ask(index, **more):
    return sequence([1, 7, 8, index], name=str(index), seed=index, **{"max_tokens": 50, **ASKS[index], **more})


def test_every_way_of_asking_against_the_naive_definition():
    """Twelve steps of a mixed batch; each row is compared with one row of NumPy."""
    sampler, sequences = head(V), [ask(i) for i in range(len(ASKS))]
    for number in range(12):
        logits = logits_of(*range(100 * number, 100 * number + len(ASKS)))
        before = {made: list(made.token_ids[4:]) for made in sequences}
        results = step(sampler, logits, sequences)
        for row, made in zip(logits, sequences, strict=True):
            params, generated = made.request.params, before[made]
            x = edited(row, params, made.token_ids[:4], generated)
            (token,) = results[made].token_ids
            if params.temperature == 0.0:
                assert token == x.argmax()
            else:
                uniform = Uniforms().at(stream_key(params.seed, 0), len(generated))
                assert token == inverse_cdf(kept(x, params), uniform)
            raw = row.log_softmax(0)
            if params.logprobs is None:
                assert results[made].logprobs is None
            else:
                (entry,) = results[made].logprobs
                assert entry.token_id == token
                assert entry.logprob == pytest.approx(raw[token].item(), abs=2e-6)
                assert entry.rank == 1 + int((raw > raw[token]).sum())
                assert [i for i, _ in entry.top] == raw.argsort(descending=True)[: params.logprobs].tolist()
            assert results[made].prompt_logprobs is None


@given(order=st.permutations(range(len(ASKS))), size=st.integers(1, len(ASKS)))
@settings(deadline=None, max_examples=20)
def test_neighbours_and_row_order_change_nothing(order, size):
    def run(groups):
        """Each sequence's tokens, when these groups run as batches of their own."""
        answers = {}
        for group in groups:
            sampler, sequences = head(V), [ask(i) for i in group]
            for number in range(5):
                step(sampler, logits_of(*(100 * number + i for i in group)), sequences)
            answers |= {made.id: made.token_ids for made in sequences}
        return answers

    assert run([order[:size]]) == run([[i] for i in order[:size]])


def test_choices_and_seeds_are_streams_of_their_own():
    def answer(seed, choice):
        made, sampler = sequence([1], seed=seed, choice=choice), head(V)
        for number in range(10):
            step(sampler, logits_of(number), [made])
        return tuple(made.token_ids)

    answers = {(seed, choice): answer(seed, choice) for seed in (None, 0, 1) for choice in (0, 1)}
    assert len(set(answers.values())) == 6
    assert answers[0, 1] == answer(0, 1)
    assert answers[None, 0] != answer(None, 0)


def test_a_restart_in_the_middle_draws_the_same_token():
    """What preemption, or a sequence that comes back with its answer so far, amounts to."""
    params = {"seed": 3, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "top_p": 0.9}
    made, sampler = sequence([1, 2, 3], **params), head(V)
    for number in range(8):
        step(sampler, logits_of(number), [made])
    again = sequence([1, 2, 3], generated=made.token_ids[3:7], **params)
    for number in range(4, 8):
        step(head(V), logits_of(number), [again])
    assert again.token_ids == made.token_ids


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(1, V)
    logits[0, [300, 20, 599]] = 1.0
    for params in ({"temperature": 0.0}, {"temperature": 1e-6}, {"top_k": 1}):
        assert step(head(V), logits, [sequence([1], **params)]).popitem()[1].token_ids == [20]


def test_the_answer_ends_by_the_stop_rule_and_holds_the_stop_token():
    def result(token, **params):
        logits = torch.zeros(1, V)
        logits[0, token] = 9.0
        (result,) = step(head(V), logits, [sequence([1, 3], temperature=0.0, **params)]).values()
        return result.token_ids, result.finish

    assert result(EOS) == ([EOS], Finish(reason="stop"))
    assert result(8, stop_token_ids=(8,)) == ([8], Finish(reason="stop", stop_reason=8))
    assert result(8, max_tokens=1) == ([8], Finish(reason="length"))
    assert result(8) == ([8], None)


def test_min_tokens_holds_every_stop_back_and_then_lets_go():
    made, sampler = sequence([1], temperature=0.0, min_tokens=3, stop_token_ids=(8,), max_tokens=9), head(V)
    logits = torch.zeros(1, V)
    logits[0, [EOS, 8, 40]] = torch.tensor([9.0, 8.0, 7.0])
    finishes = [step(sampler, logits, [made])[made].finish for _ in range(4)]
    assert made.token_ids == [1, 40, 40, 40, EOS]
    assert finishes == [None, None, None, Finish(reason="stop")]


def test_min_tokens_does_not_hold_back_an_eos_that_is_ignored():
    made = sequence([1], temperature=0.0, min_tokens=3, ignore_eos=True)
    logits = torch.zeros(1, V)
    logits[0, EOS] = 9.0
    assert step(head(V), logits, [made])[made].token_ids == [EOS]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("index", range(len(ASKS)))
def test_a_row_that_is_not_finite_ends_its_own_sequence_only(index, bad):
    sequences = [ask(i) for i in range(len(ASKS))]
    logits = logits_of(*range(len(ASKS)))
    healthy = step(head(V), logits, sequences, append=False)
    logits[index, 77] = bad
    results = step(head(V), logits, sequences, append=False)
    for i, made in enumerate(sequences):
        if i == index:
            finish = results[made].finish
            assert (finish.reason, finish.kind) == ("error", "StepError")
            assert "not finite" in finish.error
            assert repr(made.id) in finish.error
            assert results[made].token_ids == []
            assert results[made].logprobs is None
        else:
            assert results[made] == healthy[made]


def test_a_row_without_any_possible_token_is_an_error_too():
    made = sequence([1])
    assert step(head(V), torch.full((1, V), -torch.inf), [made], append=False)[made].finish.kind == "StepError"


def test_half_precision_logits_are_read_as_float32():
    made = sequence([1], temperature=0.0, logprobs=0)
    logits = logits_of(5).bfloat16()
    (entry,) = step(head(V), logits, [made])[made].logprobs
    assert entry.logprob == pytest.approx(logits.float().log_softmax(1).max().item(), abs=1e-6)


# -- rows, chunks and prompt logprobs ---


def test_rows_are_the_last_of_the_chunks_that_reach_their_end():
    decode, whole, half = sequence([1, 2], generated=[3]), sequence(range(5)), sequence(range(9))
    plan = Plan([Chunk(half, 0, 4), Chunk(decode, 2, 1), Chunk(whole, 1, 4)])
    assert head(V).rows(plan) == [4, 8]
    assert head(V).rows(Plan([Chunk(half, 0, 4)])) == []


def test_rows_of_a_prompt_that_is_scored():
    scored, other = sequence(range(6), prompt_logprobs=1), sequence(range(3))
    sampler = head(V)
    assert sampler.rows(Plan([Chunk(other, 0, 3), Chunk(scored, 0, 4)])) == [2, 3, 4, 5, 6]
    assert head(V).rows(Plan([Chunk(scored, 0, 6), Chunk(other, 0, 3)])) == [0, 1, 2, 3, 4, 5, 8]


def run_in_chunks(made, hidden, sizes, sampler=None, start=0):
    """Compute the sequence's known tokens in chunks of these sizes; returns all results."""
    sampler = sampler or head(V)
    results = []
    for size in sizes:
        plan = Plan([Chunk(made, start, size)])
        rows = sampler.rows(plan)
        results += sampler.finish(plan, HiddenRows(hidden[start : start + size][rows], rows))
        start += size
    return results


@pytest.mark.parametrize("num_top", [0, 3])
def test_prompt_logprobs_are_the_same_at_every_split(num_top):
    prompt = [5, 9, 400, 3, 3, 77, 599]
    hidden = logits_of(*range(7))
    exact = hidden.log_softmax(1)
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, 7), n) for n in range(7)):
        edges = [0, *cuts, 7]
        made = sequence(prompt, temperature=0.0, prompt_logprobs=num_top)
        (result,) = run_in_chunks(made, hidden, [b - a for a, b in itertools.pairwise(edges)])
        first, *entries = result.prompt_logprobs
        assert first is None
        assert [entry.token_id for entry in entries] == prompt[1:]
        for row, entry in zip(exact, entries, strict=False):
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=2e-6)
            assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
            assert [i for i, _ in entry.top] == row.argsort(descending=True)[:num_top].tolist()
        assert result.token_ids == [int(hidden[6].argmax())]


def test_a_prompt_is_scored_in_pieces_of_bounded_size(monkeypatch):
    hidden = logits_of(*range(9))
    whole, pieces = (sequence(range(10, 19), temperature=0.0, prompt_logprobs=2) for _ in range(2))
    expected = run_in_chunks(whole, hidden, [9])[0].prompt_logprobs
    monkeypatch.setattr(head_module, "_MAX_PROMPT_LOGITS", 2 * V)
    sizes = []

    def logits(rows):
        sizes.append(len(rows))
        return rows.clone()

    sampler = head_module.SamplingHead(logits, REFERENCE, V, frozenset({EOS}), 100)
    assert run_in_chunks(pieces, hidden, [9], sampler)[0].prompt_logprobs == expected
    assert sizes == [2, 2, 2, 2, 1]


def test_prompt_logprobs_come_once_and_survive_preemption():
    hidden = logits_of(*range(8))
    made, sampler = sequence([4, 5, 6, 7, 8, 9], temperature=0.0, prompt_logprobs=0), head(V)
    assert run_in_chunks(made, hidden, [2, 2], sampler) == []
    (result,) = run_in_chunks(made, hidden, [3, 3], sampler)  # preempted mid-prefill: from the start again
    assert [entry and entry.token_id for entry in result.prompt_logprobs] == [None, 5, 6, 7, 8, 9]
    made.token_ids += result.token_ids
    (result,) = run_in_chunks(made, hidden, [5, 2], sampler)  # preempted after its first token
    assert result.prompt_logprobs is None
    assert len(result.token_ids) == 1


def test_a_prompt_of_one_token_has_nothing_to_score():
    made = sequence([4], temperature=0.0, prompt_logprobs=5)
    (result,) = run_in_chunks(made, logits_of(0), [1])
    assert result.prompt_logprobs == [None]


def test_a_scored_prompt_beside_others_gets_its_own_rows():
    scored, other = sequence([4, 5, 6], temperature=0.0, prompt_logprobs=0), sequence([1, 2], temperature=0.0)
    hidden = logits_of(0, 1, 2, 3, 4)
    sampler, plan = head(V), Plan([Chunk(other, 0, 2), Chunk(scored, 0, 3)])
    rows = sampler.rows(plan)
    results = {result.sequence: result for result in sampler.finish(plan, HiddenRows(hidden[rows], rows))}
    assert results[other].token_ids == [int(hidden[1].argmax())]
    assert results[scored].token_ids == [int(hidden[4].argmax())]
    exact = hidden.log_softmax(1)
    expected = [exact[2, 5].item(), exact[3, 6].item()]
    assert [entry.logprob for entry in results[scored].prompt_logprobs[1:]] == pytest.approx(expected, abs=2e-6)


def test_a_prompt_row_that_is_not_finite_ends_its_sequence_only():
    broken, other = sequence([4, 5, 6], prompt_logprobs=0, name="broken"), sequence([1, 2], temperature=0.0)
    hidden = logits_of(0, 1, 2, 3, 4)
    hidden[1, 50] = torch.nan
    sampler, plan = head(V), Plan([Chunk(broken, 0, 3), Chunk(other, 0, 2)])
    rows = sampler.rows(plan)
    results = {result.sequence: result for result in sampler.finish(plan, HiddenRows(hidden[rows], rows))}
    assert results[broken].finish.kind == "StepError"
    assert results[broken].token_ids == []
    assert results[other].token_ids == [int(hidden[4].argmax())]


# -- state ---


def test_forget_drops_all_state_and_is_safe_for_strangers():
    sampler, made = head(V), ask(3)
    sampler.forget(made)
    step(sampler, logits_of(0), [made])
    assert len(sampler._states) == 1
    sampler.forget(made)
    sampler.forget(made)
    assert sampler._states == {}


def test_a_request_without_a_seed_keeps_its_stream_until_forgotten():
    sampler, made = head(V), sequence([1])
    repeats = [step(sampler, torch.zeros(1, V), [made], append=False)[made].token_ids for _ in range(5)]
    assert repeats == [repeats[0]] * 5
    afresh = []
    for _ in range(5):
        sampler.forget(made)
        afresh.append(step(sampler, torch.zeros(1, V), [made], append=False)[made].token_ids)
    assert len(set(map(tuple, afresh))) > 1


def test_the_greedy_way_makes_nothing_as_wide_as_the_vocabulary(monkeypatch):
    """One maximum over the logits; no copy of them, no draw, no edit."""
    for name in ("filters_of", "token_logprobs"):
        monkeypatch.setattr(head_module, name, None)
    sampler = head_module.SamplingHead(lambda rows: rows, REFERENCE, 20_000, frozenset(), 100)
    plan, logits = Plan([last_token(sequence([1], temperature=0.0)) for _ in range(4)]), torch.zeros(4, 20_000)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        sampler.finish(plan, HiddenRows(logits, list(range(4))))
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest < logits[0].nbytes


def test_states_hold_nothing_as_wide_as_the_vocabulary():
    wide = 200_000
    sampler = head(wide)
    sequences = [ask(i) for i in range(len(ASKS))]
    step(sampler, torch.randn(len(ASKS), wide), sequences)
    arrays = []
    for state in sampler._states.values():
        arrays += [
            state.ending_ids,
            *(state.bias or ()),
            *((state.seen._ids, state.seen._counts) if state.seen else ()),
        ]
    sizes = [len(array) for array in arrays if isinstance(array, np.ndarray)]
    assert sizes
    assert max(sizes) < 100


def test_only_a_repetition_penalty_keeps_the_ids_of_the_prompt():
    sampler, repeats, frequent = head(V), ask(3), ask(4)
    step(sampler, logits_of(0, 1), [repeats, frequent], append=False)
    assert sampler._states[repeats].seen.ids.tolist() == [1, 3, 7, 8]
    assert sampler._states[frequent].seen.ids.tolist() == []
