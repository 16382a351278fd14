"""Encoders in few bits: vectors close to those of the whole weights, and the same in any company."""

import logging

import encoders_made
import pytest
import torch

from izh.engine.build import load_encoders
from izh.engine.messages import Encode
from izh.errors import OptionError
from izh.llm import LLM
from izh.pooling import load_embedder, load_reranker

TEXTS = ["a cat sits on the mat", "für Äpfel 日本 🙂", "", "x", " ".join(["one text of many words, with a comma"] * 20)]


@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.999), ("int4", 0.9)])
async def test_vectors_are_near_and_alone_what_they_are_in_a_batch(quantization: str, least: float) -> None:
    whole, quantized = load_embedder("demo"), load_embedder("demo", quantization=quantization)
    expected, _ = await whole.vectors(TEXTS)
    vectors, _ = await quantized.vectors(TEXTS)
    cosines = torch.nn.functional.cosine_similarity(vectors.double(), expected.double())
    assert cosines.min() > least
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


async def test_models_beside_the_generator_take_its_quantization() -> None:
    service = load_embedder("demo", quantization="int8")
    expected = service.compute(service.read(TEXTS))
    encoders = load_encoders({"embed": "demo"}, "int8")
    encoders.add(Encode(call_id=1, encoder="embed", entries=service.read(TEXTS)))
    (reply,) = encoders.turn(10_000)
    assert reply.results == [vector.numpy().tobytes() for vector in expected]
    service.close()


async def test_what_runs_on_transformers_stays_whole_and_the_log_says_so(tmp_path, caplog) -> None:
    encoders_made.save(tmp_path, "bert", hidden_act="silu")
    with caplog.at_level(logging.WARNING, "izh.pooling.load"):
        quantized, whole = load_embedder(tmp_path, quantization="int8"), load_embedder(tmp_path)
    (line,) = caplog.messages
    assert "quantization int8" in line
    assert "stays in float32" in line
    ids = [[5, 6, 7]]
    assert torch.equal((await quantized.vectors(ids))[0], (await whole.vectors(ids))[0])
    quantized.close()
    whole.close()


@pytest.mark.parametrize("load", [load_embedder, load_reranker])
def test_another_quantization_is_refused_by_name(load) -> None:
    with pytest.raises(OptionError, match="quantization: 'int3' is not known; int8 and int4 are"):
        load("demo", quantization="int3")
