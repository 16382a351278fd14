"""Cross-encoders score as transformers and sentence-transformers score them."""

import json

import encoders_made
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoTokenizer

from izh.errors import ModelLoadError
from izh.pooling import load_reranker
from izh.pooling.encoders import HFClassifier, NativeEncoder

QUERY = "the quick query"
DOCUMENTS = ["a document", "over the lazy dog, für Äpfel 日本", "", "def f(x): return x", "a document"]


def saved(folder, family, **options):
    model = encoders_made.save(folder, family, num_labels=1, **options)
    return model


@torch.inference_mode()
def logits_of(model, folder, query=QUERY, documents=DOCUMENTS):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = tokenizer(
        [query] * len(documents), documents, padding=True, truncation="longest_first", return_tensors="pt"
    )
    return model(**pairs).logits[:, 0]


@pytest.mark.parametrize("family", encoders_made.FAMILIES)
async def test_families(tmp_path, family) -> None:
    model = saved(tmp_path, family)
    expected = logits_of(model, tmp_path)
    assert expected.std() > 0.1
    service = load_reranker(tmp_path)
    assert isinstance(service.encoder, NativeEncoder)
    raw, _ = await service.scores(QUERY, DOCUMENTS, raw_scores=True)
    torch.testing.assert_close(torch.tensor(raw), expected, rtol=1e-5, atol=1e-5)
    scores, _ = await service.scores(QUERY, DOCUMENTS)
    theirs = CrossEncoder(str(tmp_path), device="cpu").predict([(QUERY, document) for document in DOCUMENTS])
    torch.testing.assert_close(torch.tensor(scores), torch.from_numpy(theirs), rtol=1e-5, atol=1e-5)
    alone = [(await service.scores(QUERY, [document], raw_scores=True))[0][0] for document in DOCUMENTS]
    assert alone == raw
    ranked = await service.rerank(QUERY, DOCUMENTS, 3)
    best = sorted(range(5), key=lambda i: (-scores[i], i))[:3]
    assert [result["index"] for result in ranked["results"]] == best
    assert raw[0] == raw[4]
    service.close()


async def test_a_long_document_is_cut_longest_first_when_asked(tmp_path) -> None:
    model = saved(tmp_path, "bert")
    documents = ["the lazy dog " * 40, "brown fox"]
    service = load_reranker(tmp_path)
    with pytest.raises(ValueError, match=r"documents\[0\] has \d+ tokens; this model takes at most 60"):
        await service.rerank(QUERY, documents)
    raw, num_tokens = await service.scores(QUERY, documents, raw_scores=True, truncate_prompt_tokens=-1)
    torch.testing.assert_close(torch.tensor(raw), logits_of(model, tmp_path, documents=documents), rtol=1e-5, atol=1e-5)
    assert 60 < num_tokens < 80
    service.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
async def test_the_activation_of_the_config(tmp_path, fields) -> None:
    saved(tmp_path, "bert")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    await assert_scores_are_theirs(tmp_path)


async def test_what_sentence_transformers_saved(tmp_path) -> None:
    saved(tmp_path / "made", "bert")
    made = CrossEncoder(str(tmp_path / "made"), device="cpu", max_length=12, activation_fn=torch.nn.Tanh())
    made.save_pretrained(str(tmp_path / "saved"))
    service = await assert_scores_are_theirs(tmp_path / "saved")
    assert service.max_model_len == 12
    extra = {"idx": 1, "name": "1", "path": "1", "type": "sentence_transformers.cross_encoder.modules.LogitScore"}
    modules = tmp_path / "saved" / "modules.json"
    modules.write_text(json.dumps([*json.loads(modules.read_text()), extra]))
    with pytest.raises(ModelLoadError, match="LogitScore is not supported"):
        load_reranker(tmp_path / "saved")


async def test_a_prompt_before_every_pair_is_refused(tmp_path) -> None:
    saved(tmp_path / "made", "bert")
    prompts = {"prompts": {"q": "rank: "}, "default_prompt_name": "q"}
    CrossEncoder(str(tmp_path / "made"), device="cpu", **prompts).save_pretrained(str(tmp_path / "saved"))
    with pytest.raises(ModelLoadError, match="'rank: '"):
        load_reranker(tmp_path / "saved")


async def assert_scores_are_theirs(folder):
    """With truncation, and such that the sigmoid would give others."""
    service = load_reranker(folder)
    scores, _ = await service.scores(QUERY, DOCUMENTS, truncate_prompt_tokens=-1)
    theirs = CrossEncoder(str(folder), device="cpu").predict([(QUERY, document) for document in DOCUMENTS])
    torch.testing.assert_close(torch.tensor(scores), torch.from_numpy(theirs), rtol=1e-5, atol=1e-5)
    raw, _ = await service.scores(QUERY, DOCUMENTS, raw_scores=True, truncate_prompt_tokens=-1)
    assert torch.tensor(raw).sigmoid().tolist() != pytest.approx(scores)
    service.close()
    return service


async def test_other_classifiers_run_on_transformers(tmp_path) -> None:
    model = saved(tmp_path, "bert", hidden_act="silu")
    service = load_reranker(tmp_path)
    assert isinstance(service.encoder, HFClassifier)
    raw, _ = await service.scores(QUERY, DOCUMENTS, raw_scores=True)
    torch.testing.assert_close(torch.tensor(raw), logits_of(model, tmp_path), rtol=1e-5, atol=1e-5)
    service.close()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"architectures": ["BertModel"]}, "no sequence classifier"),
        ({"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}, "2 labels; a reranker has one"),
        ({"sentence_transformers": {"activation_fn": "my.Code"}}, "'my.Code' is not supported"),
    ],
)
def test_what_is_no_reranker_is_refused(tmp_path, fields, says) -> None:
    saved(tmp_path, "bert")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ModelLoadError, match=says):
        load_reranker(tmp_path)
