"""Encoders in 8 bits: vectors close to those of the whole weights, and the same in any company."""

import pytest
import torch

from izh.errors import OptionError
from izh.llm import LLM
from izh.pooling import load_embedder, load_reranker

TEXTS = ["a cat sits on the mat", "für Äpfel 日本 🙂", "", "x", " ".join(["one text of many words, with a comma"] * 20)]


async def test_vectors_are_within_a_thousandth_and_alone_what_they_are_in_a_batch() -> None:
    whole, quantized = load_embedder("demo"), load_embedder("demo", quantization="int8")
    expected, _ = await whole.vectors(TEXTS)
    vectors, _ = await quantized.vectors(TEXTS)
    cosines = torch.nn.functional.cosine_similarity(vectors.double(), expected.double())
    assert cosines.min() > 0.999
    assert not torch.equal(vectors, expected)
    for i, text in enumerate(TEXTS):
        alone, _ = await quantized.vectors([text])
        assert torch.equal(alone[0], vectors[i])
    whole.close()
    quantized.close()


def test_llm_passes_it_on() -> None:
    vector = LLM(model=None, embedder="demo", quantization="int8", quiet=True).embed(["a cat"])
    whole = LLM(model=None, embedder="demo", quiet=True).embed(["a cat"])
    assert vector.shape == whole.shape
    assert (vector != whole).any()


@pytest.mark.parametrize("load", [load_embedder, load_reranker])
def test_another_quantization_is_refused_by_name(load) -> None:
    with pytest.raises(OptionError, match="quantization: 'int4' is not known"):
        load("demo", quantization="int4")
