"""How the text is cut, what is made of log-probabilities, and the engine's own scores of it."""

import math

import clocked
import pytest
import tiny_checkpoint
import torch
from transformers import AutoModelForCausalLM

from izh.bench.perplexity import TEXT, figure, score, table, windows
from izh.llm import LLM


def test_windows_cover_the_text_and_none_is_a_single_token() -> None:
    assert windows(list(range(7)), 3) == [[0, 1, 2], [3, 4, 5]]
    assert windows(list(range(8)), 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert len(TEXT.read_text(encoding="utf-8")) > 20_000


def test_figures_and_table() -> None:
    first = figure("whole", [-math.log(8.0)] * 3)
    second = figure("halved", [-math.log(10.0)] * 3, [first])
    assert (first.perplexity, first.increase) == (pytest.approx(8.0), 0.0)
    assert (second.perplexity, second.increase) == (pytest.approx(10.0), pytest.approx(0.25))
    document = {"model": "demo", "options": {"window_tokens": 512}, "date": "today"}
    cells, text = clocked.shown(table([first, second], document))
    assert cells == [["whole", "8.000", ""], ["halved", "10.000", "+25.00%"]]
    assert "3 tokens scored" in text


def test_scores_are_those_of_transformers(tmp_path) -> None:
    path = tiny_checkpoint.save_llama(tmp_path)
    llm = LLM(str(path), quiet=True, kv_cache_gb=0.01, device="cpu")
    pieces = windows([(7 * i) % 300 + 5 for i in range(50)], 20)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    expected: list[float] = []
    with torch.inference_mode():
        for piece in pieces:
            logprobs = model(input_ids=torch.tensor([piece])).logits[0].log_softmax(-1)
            expected += [logprobs[i, token].item() for i, token in enumerate(piece[1:])]
    assert score(llm, pieces, "it") == pytest.approx(expected, abs=1e-3)
