"""The offline face's vectors and scores: shapes, order, which models there are, progress."""

import encoders_made
import numpy as np
import pytest
import tiny_checkpoint
from sentence_transformers import CrossEncoder, SentenceTransformer

from izh import LLM
from izh.errors import OptionError, RequestError
from izh.outputs import RerankOutput

TEXTS = ["the quick brown fox", "a query, and a document", "für Äpfel 日本"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("beside")
    tiny_checkpoint.save_llama(root / "tiny")
    encoders_made.save(root / "embedder", "bert")
    encoders_made.save(root / "reranker", "roberta", num_labels=1)
    return root


@pytest.fixture(scope="module")
def llm(folders):
    return LLM(None, embedder=folders / "embedder", reranker=str(folders / "reranker"), num_threads=1, quiet=True)


def test_vectors_are_rows_in_order(llm, folders):
    vectors = llm.embed(TEXTS)
    theirs = SentenceTransformer(str(folders / "embedder"), device="cpu").encode(TEXTS, normalize_embeddings=True)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, theirs, rtol=0, atol=1e-5)
    for text, vector in zip(TEXTS, vectors, strict=True):
        assert np.array_equal(llm.embed(text), vector[None]), "one text gives one row, the same alone as with others"
    assert np.array_equal(llm.embed(llm.embedder.tokenizer.encode(TEXTS[1])), vectors[1:2])


def test_the_best_document_comes_first(llm, folders):
    theirs = CrossEncoder(str(folders / "reranker"), device="cpu").predict([("quick fox", text) for text in TEXTS])
    ranked = llm.rerank("quick fox", TEXTS)
    assert [each.index for each in ranked] == np.argsort(-theirs).tolist()
    assert [each.score for each in ranked] == pytest.approx(sorted(theirs.tolist(), reverse=True), abs=1e-5)
    assert [each.document for each in ranked] == [TEXTS[each.index] for each in ranked]
    assert llm.rerank("quick fox", TEXTS, 1) == ranked[:1]
    assert isinstance(ranked[0], RerankOutput)


def test_bad_arguments_are_refused(llm):
    with pytest.raises(RequestError, match="at least 1 text"):
        llm.embed([])
    with pytest.raises(RequestError, match="at least 1 text"):
        llm.rerank("quick fox", [])
    with pytest.raises(RequestError, match=r"texts\[1\] has \d+ tokens; this model takes at most 60"):
        llm.embed(["fox", "fox " * 100])
    assert llm.embed(["fox", "fox " * 100], truncate_prompt_tokens=-1).shape == (2, 48)


def test_progress_is_shown_when_asked_for(llm, capsys):
    llm.embed(TEXTS, progress=True)
    llm.rerank("quick fox", TEXTS, progress=True)
    shown = capsys.readouterr()
    assert "Embedding" in shown.err
    assert "Reranking" in shown.err
    assert "3/3" in shown.err
    assert shown.out == ""
    llm.embed(TEXTS)
    assert capsys.readouterr().err == ""


def test_without_a_model_nothing_is_generated(llm):
    for ask in (
        lambda: llm.generate("hello"),
        lambda: llm.chat([{"role": "user", "content": "hello"}]),
        lambda: next(llm.stream("hello")),
        lambda: llm.load_lora("a", "b"),
        llm.reset_prefix_cache,
        lambda: llm.tokenizer,
        lambda: llm.max_model_len,
    ):
        with pytest.raises(OptionError, match="made with model=None"):
            ask()


def test_options_of_a_model_that_is_not_there_are_refused(folders):
    with pytest.raises(OptionError, match="max_num_seqs is about a model that generates"):
        LLM(None, embedder=folders / "embedder", max_num_seqs=3)


def test_a_model_beside_its_embedder(folders):
    llm = LLM(str(folders / "tiny"), embedder=folders / "embedder", quiet=True, kv_cache_gb=0.01)
    assert llm.generate("hello", progress=False)[0].finished
    assert llm.embed("hello").shape == (1, 48)
    with pytest.raises(OptionError, match="no reranker was named"):
        llm.rerank("hello", ["fox"])
