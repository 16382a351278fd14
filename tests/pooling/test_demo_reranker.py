"""The demo's reranker against transformers and PEFT, and what is no such reranker."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertModel

from izh.errors import ModelLoadError
from izh.model.demo_embedder import DEMO_EMBEDDER, DEMO_RERANKER, demo_embedder_directory
from izh.pooling import load_reranker
from izh.pooling.matching import HEAD_FILE

QUERY = "report or omit repeated lines"
DOCUMENTS = [
    "Filter adjacent matching lines from INPUT (or standard input), writing to OUTPUT (or standard output).",
    "Write each FILE to standard output, last line first.",
    "x",
    "naïve café größer 東京 🙂 " * 60,
]


@pytest.fixture(scope="module")
def service():
    made = load_reranker("demo")
    yield made
    made.close()


@pytest.fixture(scope="module")
def theirs():
    """Raw scores with the adapter beside the weights, one pair at a time."""
    directory = demo_embedder_directory()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    base = BertModel.from_pretrained(directory, add_pooling_layer=False, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(DEMO_RERANKER)).eval()
    head = load_file(DEMO_RERANKER / HEAD_FILE)
    scores = []
    for document in DOCUMENTS:
        pair = tokenizer(QUERY, document, truncation=True, max_length=512, return_tensors="pt")
        types = pair.pop("token_type_ids")[0]
        with torch.inference_mode():
            rows = model(**pair, token_type_ids=torch.zeros_like(pair["input_ids"])).last_hidden_state[0]
        query, passage = rows[types == 0], rows[types == 1]
        nearest = torch.cosine_similarity(query[:, None], passage[None], dim=-1).max(1).values
        weights = torch.softmax(query @ head["weigh"], 0)
        scores.append(head["scale"] * (weights * nearest).sum() + rows[0] @ head["cls"] + head["bias"])
    return torch.stack(scores)


async def test_scores_are_those_of_transformers_with_peft(service, theirs) -> None:
    raw, num_tokens = await service.scores(QUERY, DOCUMENTS, raw_scores=True, truncate_prompt_tokens=-1)
    torch.testing.assert_close(torch.tensor(raw), theirs, rtol=1e-5, atol=1e-5)
    scores, _ = await service.scores(QUERY, DOCUMENTS, truncate_prompt_tokens=-1)
    torch.testing.assert_close(torch.tensor(scores), theirs.sigmoid(), rtol=0, atol=1e-5)
    assert num_tokens > 512
    assert scores[0] == max(scores)


async def test_a_pair_alone_has_the_same_score_to_the_last_bit(service) -> None:
    together, _ = await service.scores(QUERY, DOCUMENTS, truncate_prompt_tokens=-1)
    for document, score in zip(DOCUMENTS, together, strict=True):
        assert (await service.scores(QUERY, [document], truncate_prompt_tokens=-1))[0] == [score]


async def test_an_empty_document_has_a_score_and_a_text_alone_has_none(service) -> None:
    (score,), _ = await service.scores(QUERY, [""])
    assert 0 < score < 0.5
    vectors, _ = await service.vectors(QUERY)
    assert vectors.isnan().all()


def test_it_is_small_and_says_only_what_it_is() -> None:
    files = {file.name: file for file in DEMO_RERANKER.iterdir()}
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors", HEAD_FILE}
    assert sum(file.stat().st_size for file in files.values()) < 2_000_000
    config = json.loads(files["adapter_config.json"].read_text())
    assert config["base_model_name_or_path"] == DEMO_EMBEDDER
    assert not [value for value in config.values() if isinstance(value, str) and value.startswith(("/", "~"))]


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(DEMO_RERANKER, tmp_path / "copy")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"base_model_name_or_path": "other"}, "made for 'other'"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported"),
        ({"use_dora": True}, "use_dora = True is not supported"),
    ],
)
def test_other_adapters_are_refused(copy, fields, says) -> None:
    path = copy / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ModelLoadError, match=says):
        load_reranker(copy)


def test_a_matrix_of_another_shape_and_one_too_many_are_refused(copy) -> None:
    path = copy / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.encoder.layer.0.attention.self.query.lora_A.weight"
    save_file(tensors | {name: tensors[name][:, 1:].contiguous()}, path)
    with pytest.raises(ModelLoadError, match=r"do not fit 'encoder.layer.0.attention.self.query.weight'"):
        load_reranker(copy)
    save_file(tensors | {name.replace("layer.0", "layer.9"): tensors[name].clone()}, path)
    with pytest.raises(ModelLoadError, match=r"layer.9.*has no place"):
        load_reranker(copy)
    path.write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match=r"adapter_model.safetensors: "):
        load_reranker(copy)


def test_a_head_for_another_size_is_refused(copy) -> None:
    head = load_file(copy / HEAD_FILE)
    save_file(head | {"cls": head["cls"][:5].contiguous()}, copy / HEAD_FILE)
    with pytest.raises(ModelLoadError, match=r"head.safetensors: holds .*'cls': \[5\]"):
        load_reranker(copy)
    (copy / HEAD_FILE).write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match=r"head.safetensors: "):
        load_reranker(copy)
