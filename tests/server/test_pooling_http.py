"""Embeddings, reranks and scores over HTTP, asked for by the clients that people use."""

import base64
import struct

import cohere
import encoders_made
import httpx
import openai
import pytest
import torch
from fake_engine import FakeEngine
from sentence_transformers import CrossEncoder, SentenceTransformer
from serving import serving

from izh.pooling import load_reranker

TEXTS = ["the quick brown fox", "a query, and a document", "für Äpfel 日本"]
QUERY = "the quick query"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pooling")
    encoders_made.save(root / "embedder", "bert")
    encoders_made.save(root / "reranker", "roberta", num_labels=1)
    return root


@pytest.fixture(scope="module")
def pooling_url(folders):
    with serving(
        FakeEngine(), embedder=str(folders / "embedder"), reranker=str(folders / "reranker"), pool_max_wait_ms=1.0
    ) as url:
        yield url


@pytest.fixture(scope="module")
def pooling_http(pooling_url):
    with httpx.Client(base_url=pooling_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def vectors(folders):
    """sentence-transformers' own mean pooling, to length 1, as this server gives vectors of a checkpoint that does not
    say otherwise."""
    model = SentenceTransformer(str(folders / "embedder"), device="cpu")
    return torch.from_numpy(model.encode(TEXTS, normalize_embeddings=True))


@pytest.fixture(scope="module")
def scores(folders):
    return CrossEncoder(str(folders / "reranker"), device="cpu").predict([(QUERY, text) for text in TEXTS]).tolist()


def test_the_openai_client_whose_default_is_base64(pooling_url, vectors):
    with openai.OpenAI(base_url=f"{pooling_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="embedder", input=TEXTS)
        assert [item.index for item in answer.data] == [0, 1, 2]
        torch.testing.assert_close(torch.tensor([item.embedding for item in answer.data]), vectors, rtol=0, atol=1e-5)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
        floats = client.embeddings.create(model="embedder", input=TEXTS[0], encoding_format="float")
        torch.testing.assert_close(torch.tensor(floats.data[0].embedding), vectors[0], rtol=0, atol=1e-5)
        with pytest.raises(openai.NotFoundError, match="served: 'embedder'"):
            client.embeddings.create(model="other", input="x")
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="embedder", input="x", dimensions=8)


def test_base64_is_little_endian_float32(pooling_http):
    body = {"input": [5, 6, 7], "encoding_format": "base64"}
    raw = base64.b64decode(pooling_http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"])
    floats = pooling_http.post("/v1/embeddings", json=body | {"encoding_format": "float"}).json()
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == floats["data"][0]["embedding"]
    assert floats["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_the_cohere_client_reranks(pooling_url, scores):
    best = sorted(range(3), key=lambda index: -scores[index])
    client = cohere.ClientV2(api_key="none", base_url=pooling_url)
    answer = client.rerank(model="reranker", query=QUERY, documents=TEXTS, top_n=2)
    assert [result.index for result in answer.results] == best[:2]
    assert [result.relevance_score for result in answer.results] == pytest.approx(
        [scores[index] for index in best[:2]], abs=1e-5
    )
    old = cohere.Client(api_key="none", base_url=pooling_url)
    answer = old.rerank(model="reranker", query=QUERY, documents=TEXTS, return_documents=True)
    assert [result.document.text for result in answer.results] == [TEXTS[index] for index in best]


@pytest.mark.parametrize("route", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_jinas_and_coheres_shape(pooling_http, scores, route):
    answer = pooling_http.post(route, json={"query": QUERY, "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]})
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert [result["relevance_score"] for result in results] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)
    has_texts = route != "/v2/rerank"
    assert all(("document" in result) == has_texts for result in results)
    if has_texts:
        assert [result["document"]["text"] for result in results] == [TEXTS[result["index"]] for result in results]


def test_scores_of_pairs(pooling_http, scores, folders):
    def ask(**body):
        answer = pooling_http.post("/v1/score", json=body)
        assert answer.status_code == 200, answer.text
        return [item["score"] for item in answer.json()["data"]]

    assert ask(text_1=QUERY, text_2=TEXTS) == pytest.approx(scores, abs=1e-5)
    assert ask(text_1=QUERY, text_2=TEXTS[1]) == pytest.approx(scores[1:2], abs=1e-5)
    assert ask(text_1=[QUERY] * 3, text_2=TEXTS) == pytest.approx(scores, abs=1e-5)
    swapped = CrossEncoder(str(folders / "reranker"), device="cpu").predict(list(zip(TEXTS, TEXTS[::-1], strict=True)))
    assert ask(text_1=TEXTS, text_2=TEXTS[::-1]) == pytest.approx(swapped.tolist(), abs=1e-5)
    raw = ask(text_1=QUERY, text_2=TEXTS, raw_scores=True)
    assert torch.tensor(raw).sigmoid().tolist() == pytest.approx(scores, abs=1e-5)


def test_what_is_too_long_is_refused_or_cut_when_asked(pooling_http):
    long = "the lazy dog " * 60
    answer = pooling_http.post("/v1/embeddings", json={"input": long})
    assert answer.status_code == 400
    assert "truncate_prompt_tokens=-1" in answer.json()["error"]["message"]
    for asked, kept in ((-1, 60), (10, 10), (3, 3)):
        answer = pooling_http.post("/v1/embeddings", json={"input": long, "truncate_prompt_tokens": asked})
        assert answer.json()["usage"]["prompt_tokens"] == kept, answer.text
    short = {"query": QUERY, "documents": [long, "fox"], "max_tokens_per_doc": 3, "return_documents": True}
    results = pooling_http.post("/v1/rerank", json=short).json()["results"]
    assert next(each["document"]["text"] for each in results if each["index"] == 0) == "the lazy dog"


def test_models_say_what_they_can_do(pooling_http):
    cards = {card["id"]: card for card in pooling_http.get("/v1/models").json()["data"]}
    assert {name: card["tasks"] for name, card in cards.items()} == {
        "fake": ["generate", "embed"],
        "embedder": ["embed"],
        "reranker": ["rerank"],
    }
    assert cards["embedder"]["max_model_len"] == 60
    assert pooling_http.get("/v1/models/embedder").json()["id"] == "embedder"
    assert pooling_http.get("/v1/models/nobody").status_code == 404


def test_what_was_asked_is_counted(pooling_http):
    def count(name: str, model: str) -> float:
        lines = pooling_http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(f"izh:pooling_{name}{{") and f'model_name="{model}"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    names = ("requests_total", "inputs_total", "request_latency_seconds_count", "queue_time_seconds_count")
    before = {(name, model): count(name, model) for name in names for model in ("embedder", "reranker")}
    pooling_http.post("/v1/embeddings", json={"input": TEXTS})
    pooling_http.post("/v1/rerank", json={"query": QUERY, "documents": TEXTS[:2]})
    more = {key: count(*key) - value for key, value in before.items()}
    assert [more[name, "embedder"] for name in names] == [1, 3, 1, 1]
    assert [more[name, "reranker"] for name in names] == [1, 2, 1, 1]
    assert "izh:num_requests_running" in pooling_http.get("/metrics").text


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("/v1/embeddings", {"input": ""}, 200, None),  # the model's own special tokens are left
        ("/v1/embeddings", {"input": []}, 400, "input"),
        ("/v1/embeddings", {"input": [[]]}, 400, "input"),
        ("/v1/embeddings", {"input": 3}, 400, "input"),
        ("/v1/embeddings", {"input": ["a", 3]}, 400, "input"),
        ("/v1/embeddings", {"input": [10**6]}, 400, "input"),
        ("/v1/embeddings", {"input": [True]}, 400, "input"),
        ("/v1/embeddings", {}, 400, "input"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, 400, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, 400, "dimensions"),
        ("/v1/embeddings", {"input": "x", "prompt_name": "query"}, 400, "prompt_name"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 61}, 400, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 2}, 400, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "x", "colour": "red"}, 400, "colour"),
        ("/v1/embeddings", {"input": "x", "model": "reranker"}, 404, "model"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, 400, "query"),
        ("/v1/rerank", {"query": "q", "documents": []}, 400, "documents"),
        ("/v1/rerank", {"query": "q", "documents": [3]}, 400, "documents[0]"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, 400, "top_n"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "max_tokens_per_doc": 0}, 400, "max_tokens_per_doc"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "model": "embedder"}, 404, "model"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, 400, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "text_2"),
    ],
)
def test_what_cannot_be_is_said(pooling_http, route, body, status, param):
    answer = pooling_http.post(route, json=body)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert answer.json()["error"]["param"] == param


def test_without_such_models_it_says_what_there_is():
    with serving(FakeEngine()) as url, httpx.Client(base_url=url) as http:
        answer = http.post("/v1/embeddings", json={"input": "x", "model": "minilm"})
        assert (answer.status_code, "served: 'fake'" in answer.text) == (404, True)
        answer = http.post("/v1/rerank", json={"query": "q", "documents": ["a"]})
        assert (answer.status_code, "--reranker DIR" in answer.text) == (404, True)


def test_a_service_may_be_set_by_hand(folders):
    from izh.server.app import Server

    server = Server(FakeEngine())
    server.reranker = service = load_reranker(folders / "reranker", model_name="mine")
    assert server.reranker is service
    service.close()
