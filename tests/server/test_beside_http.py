"""Models beside the generator compute in the engine process: the same answers, among generation, and after a crash."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import encoders_made
import httpx
import pytest
import tiny_checkpoint
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from serving import serving

from izh.engine.async_llm import AsyncLLM

TEXTS = ["the quick brown fox", "a query, and a document", "für Äpfel 日本"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("beside")
    encoders_made.save(root / "embedder", "bert")
    encoders_made.save(root / "reranker", "roberta", num_labels=1)
    tiny_checkpoint.save_llama(root / "llm")
    return root


@pytest.fixture(scope="module")
def engine(folders):
    return AsyncLLM(model=str(folders / "llm"), kv_cache_gb=0.01, num_threads=1)


@pytest.fixture(scope="module")
def http(folders, engine):
    with (
        serving(engine, embedder=str(folders / "embedder"), reranker=str(folders / "reranker")) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def vectors(http, texts=TEXTS):
    answer = http.post("/v1/embeddings", json={"model": "embedder", "input": texts})
    assert answer.status_code == 200, answer.text
    return torch.tensor([item["embedding"] for item in answer.json()["data"]])


def scores(http):
    answer = http.post("/v1/score", json={"text_1": "a query", "text_2": TEXTS})
    assert answer.status_code == 200, answer.text
    return [item["score"] for item in answer.json()["data"]]


def complete(http, prompt):
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return http.post("/v1/completions", json=body).json()["choices"][0]["text"]


def assert_right(http, folders):
    theirs = SentenceTransformer(str(folders / "embedder"), device="cpu").encode(TEXTS, normalize_embeddings=True)
    torch.testing.assert_close(vectors(http), torch.from_numpy(theirs), rtol=0, atol=1e-5)
    pairs = [("a query", text) for text in TEXTS]
    right = CrossEncoder(str(folders / "reranker"), device="cpu").predict(pairs).tolist()
    assert scores(http) == pytest.approx(right, abs=1e-5)


def test_vectors_and_scores_are_the_checkpoints_own(http, folders):
    assert_right(http, folders)
    bad = http.post("/v1/embeddings", json={"model": "embedder", "input": [10**6]})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "input")


def test_among_answers_nobody_notices_the_other(http):
    alone, texts = vectors(http), [f"{i} {TEXTS[i % 3]}" for i in range(200)]
    many = vectors(http, texts)
    answers = [complete(http, f"hello {i}") for i in range(4)]
    with ThreadPoolExecutor(12) as pool:
        embedded = [pool.submit(vectors, http, texts) for _ in range(4)]
        answered = [pool.submit(complete, http, f"hello {i}") for i in range(4)]
        short = [pool.submit(vectors, http) for _ in range(4)]
        assert [each.result() for each in answered] == answers
        assert all(torch.equal(each.result(), many) for each in embedded)
        assert all(torch.equal(each.result(), alone) for each in short)


def test_a_new_engine_has_its_encoders_again(http, folders, engine):
    os.kill(engine.engine_pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    statuses = set()
    while (status := http.post("/v1/embeddings", json={"model": "embedder", "input": "x"}).status_code) != 200:
        statuses.add(status)
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert statuses <= {503}
    assert_right(http, folders)
