import pytest
import torch
from sampling_reference import sequence

from izh.sampling.logprobs import PromptLogprobs, token_logprobs
from izh.sequence import Chunk


def raw_rows(num_rows, vocab_size, *, seed=0):
    return 4 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocab_size", [5, 50, 5003])
def test_against_log_softmax_and_a_full_sort(vocab_size):
    raw = raw_rows(40, vocab_size)
    tokens = [i * 7 % vocab_size for i in range(39)] + [int(raw[39].argmax())]
    num_top = [i % 21 for i in range(40)]
    exact = raw.log_softmax(1)
    for row, token, k, entry in zip(exact, tokens, num_top, token_logprobs(raw, tokens, num_top), strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=2e-6)
        assert entry.rank == 1 + int((row > row[token]).sum())
        assert len(entry.top) == min(k, vocab_size)
        assert [i for i, _ in entry.top] == row.argsort(descending=True, stable=True)[:k].tolist()
        assert [p for _, p in entry.top] == pytest.approx(row.sort(descending=True).values[:k].tolist(), abs=2e-6)


def test_tied_tokens_share_a_rank_and_stand_in_order_of_id():
    raw = torch.zeros(1, 5000)
    raw[0, [9, 4, 4000]] = 1.0
    (entry,) = token_logprobs(raw, [4000], [3])
    assert entry.rank == 1
    assert [i for i, _ in entry.top] == [4, 9, 4000]
    (entry,) = token_logprobs(raw, [100], [0])
    assert entry.rank == 4
    assert entry.top == []


def test_what_neighbours_ask_for_changes_nothing():
    raw = raw_rows(3, 5003)
    together = token_logprobs(raw, [1, 2, 3], [0, 20, 5])
    assert together == [token_logprobs(raw[i : i + 1], [i + 1], [k])[0] for i, k in enumerate((0, 20, 5))]


def test_a_token_outside_the_vocabulary_has_no_entry():
    entries = token_logprobs(raw_rows(3, 50), [50, 3, -1], [1, 1, 1])
    assert [entry is None for entry in entries] == [True, False, True]


def test_a_recomputed_chunk_wants_only_what_is_missing():
    made = sequence(range(10))
    prompt = PromptLogprobs(10, 0)
    raw = raw_rows(9, 50)
    assert prompt.wanted(Chunk(made, 0, 4)) == range(4)
    prompt.fill(raw[:4], [1, 2, 3, 4])
    assert list(prompt.wanted(Chunk(made, 0, 3))) == []
    assert list(prompt.wanted(Chunk(made, 3, 4))) == [4, 5, 6]
    prompt.fill(raw[4:7], [5, 6, 7])
    assert list(prompt.wanted(Chunk(made, 0, 10))) == [7, 8]
    prompt.fill(raw[7:], [8, 9])
    assert list(prompt.wanted(Chunk(made, 0, 10))) == []
    assert list(prompt.wanted(Chunk(made, 9, 1))) == []
    assert [entry and entry.token_id for entry in prompt.entries] == [None, *range(1, 10)]


def test_a_skipped_position_is_a_fault_of_the_engine():
    with pytest.raises(AssertionError, match="skipped"):
        PromptLogprobs(10, 0).wanted(Chunk(sequence(range(10)), 2, 4))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_it_remembers_a_row_that_is_not_finite(bad):
    prompt = PromptLogprobs(10, 0)
    raw = raw_rows(4, 50)
    prompt.fill(raw[:2], [1, 2])
    assert prompt.is_finite
    raw[2, 3] = bad
    prompt.fill(raw[2:3], [3])
    prompt.fill(raw[3:], [4])
    assert not prompt.is_finite
