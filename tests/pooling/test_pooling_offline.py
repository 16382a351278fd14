"""Many texts at once: the order of the answers, refusals that name the text, and what is left when interrupted."""

import encoders_made
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer

from izh.errors import ContextLengthError, OverloadedError, RequestError
from izh.pooling import load_embedder, load_reranker
from izh.pooling.offline import embed_all, rerank_all

WORDS = encoders_made.TEXTS[0].split()
TEXTS = [" ".join(WORDS[i % 9] for i in range(start, start + 1 + start * 7 % 40)) for start in range(150)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("offline")
    encoders_made.save(root / "embedder", "bert")
    encoders_made.save(root / "reranker", "roberta", num_labels=1)
    return root


@pytest.fixture(scope="module")
def embedder(folders):
    made = load_embedder(folders / "embedder")
    yield made
    made.close()


@pytest.fixture(scope="module")
def reranker(folders):
    made = load_reranker(folders / "reranker")
    yield made
    made.close()


def test_vectors_come_in_the_order_of_the_texts(embedder, folders):
    done = []
    ours = embed_all(embedder, TEXTS, after=lambda texts, tokens: done.append((texts, tokens)))
    theirs = SentenceTransformer(str(folders / "embedder"), device="cpu").encode(TEXTS, normalize_embeddings=True)
    torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=0, atol=1e-5)
    assert len(done) > 2, "the work must come in pieces, or a progress bar would stand still"
    assert sum(texts for texts, _ in done) == len(TEXTS)
    assert sum(tokens for _, tokens in done) == sum(len(embedder.tokenizer.encode(text)) for text in TEXTS)


def test_scores_are_sorted_and_cut(reranker, folders):
    pairs = [("the quick query", text) for text in TEXTS]
    theirs = CrossEncoder(str(folders / "reranker"), device="cpu").predict(pairs).tolist()
    ranked = rerank_all(reranker, "the quick query", TEXTS)
    assert [score for _, score in ranked] == sorted((score for _, score in ranked), reverse=True)
    assert sorted(index for index, _ in ranked) == list(range(len(TEXTS)))
    assert [score for _, score in sorted(ranked)] == pytest.approx(theirs, abs=1e-5)
    assert rerank_all(reranker, "the quick query", TEXTS, top_n=3) == ranked[:3]
    raw = rerank_all(reranker, "the quick query", TEXTS, raw_scores=True)
    assert torch.tensor([score for _, score in raw]).sigmoid().tolist() == pytest.approx([s for _, s in ranked])


def test_equal_scores_keep_the_order_of_the_documents(reranker):
    ranked = rerank_all(reranker, "fox", ["dog", "the lazy", "dog", "the lazy", "dog"])
    by_text = {tuple(index for index, score in ranked if score == each) for each in {score for _, score in ranked}}
    assert by_text == {(0, 2, 4), (1, 3)}


def test_what_is_too_long_is_named_before_anything_is_computed(embedder):
    done = []
    texts = [*TEXTS[:3], "fox " * 100, *TEXTS[3:]]
    with pytest.raises(ContextLengthError, match=r"^texts\[3\] has 102 tokens; this model takes at most 60"):
        embed_all(embedder, texts, after=lambda *each: done.append(each))
    with pytest.raises(ContextLengthError, match=r"^line 4 has 102 tokens"):
        embed_all(embedder, texts, label=lambda index: f"line {index + 1}", after=lambda *each: done.append(each))
    assert done == []
    assert embed_all(embedder, texts, truncate_prompt_tokens=-1).shape == (151, 48)


@pytest.mark.parametrize(("argument", "value"), [("dimensions", 8), ("prompt_name", "query"), ("texts", [])])
def test_bad_arguments_are_named(embedder, argument, value):
    with pytest.raises(RequestError, match=argument if argument != "texts" else "at least 1 text"):
        embed_all(embedder, **({"texts": TEXTS} | {argument: value}))


def test_a_failure_drops_what_is_ahead(embedder, monkeypatch):
    """The third piece is refused: the two under way are cancelled, and the service goes on."""
    pieces = []
    submit = embedder.submit

    def counted(entries):
        if len(pieces) == 2:
            raise OverloadedError("full")
        pieces.append(submit(entries))
        return pieces[-1]

    monkeypatch.setattr(embedder, "submit", counted)
    with pytest.raises(OverloadedError, match="full"):
        embed_all(embedder, TEXTS * 4)
    assert all(piece.done() for piece in pieces)
    monkeypatch.undo()
    assert embed_all(embedder, "fox").shape == (1, 48)
