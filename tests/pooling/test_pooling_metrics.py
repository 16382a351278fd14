"""What a service counts: requests by how they ended, inputs, tokens, waiting, batches."""

import asyncio
import threading

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from izh.errors import OverloadedError, RequestError
from izh.pooling import PoolingService
from izh.pooling.metrics import PoolingMetrics


class Words:
    def encode(self, text: str) -> list[int]:
        return [1, *(len(word) for word in text.split())]

    def encode_pair(self, query: str, document: str) -> list[int]:
        return [*self.encode(query), *self.encode(document)]


class Held:
    """Rows of ones, computed only while `opened`; `began` counts batches."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.began = threading.Semaphore(0)
        self.fails = False

    def __call__(self, token_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.began.release()
        assert self.opened.wait(20)
        if self.fails:
            raise ArithmeticError("no")
        return torch.ones(*token_ids.shape, 4)


@pytest.fixture
def held():
    return Held()


@pytest.fixture
def metrics():
    return PoolingMetrics()


@pytest.fixture
def service(held, metrics):
    made = PoolingService(
        held, Words(), "tiny", max_model_len=16, score_head=lambda pooled: pooled.sum(1), max_queued_tokens=10
    )
    made.metrics = metrics.of("tiny")
    yield made
    held.opened.set()
    made.close()


def values(metrics: PoolingMetrics) -> dict[str, float]:
    """Every sample of the model, buckets and times of creation left out."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        "/".join([s.name.removeprefix("izh:pooling_"), *(s.labels[k] for k in ("task", "outcome") if k in s.labels)]): (
            s.value
        )
        for family in families
        for s in family.samples
        if s.labels["model_name"] == "tiny" and "le" not in s.labels and not s.name.endswith("_created")
    }


async def test_answered_requests(service, metrics):
    await service.vectors(["a b", "c"])
    await service.vectors("d")
    await service.scores("q", ["x y", "z"])
    got = values(metrics)
    assert got["requests_total/embed/success"] == 2
    assert got["requests_total/rerank/success"] == 1
    assert (got["inputs_total/embed"], got["inputs_total/rerank"]) == (3, 2)
    assert (got["tokens_total/embed"], got["tokens_total/rerank"]) == (3 + 2 + 2, 5 + 4)
    assert got["request_latency_seconds_count/embed"] == 2
    assert got["queue_time_seconds_count"] == 3
    assert got["batch_tokens_sum"] == 16
    assert got["request_latency_seconds_sum/embed"] + got["request_latency_seconds_sum/rerank"] > 0


async def test_every_other_end(service, held, metrics):
    with pytest.raises(RequestError):
        await service.vectors("word " * 16)
    held.opened.clear()
    gone = asyncio.ensure_future(service.vectors("a"))
    await asyncio.to_thread(held.began.acquire)
    waiting = asyncio.ensure_future(service.vectors("b c"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await service.vectors("d e f g h i j k l")
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    held.fails = True
    held.opened.set()
    with pytest.raises(ArithmeticError):
        await waiting
    got = values(metrics)
    ends = {name.split("/")[2]: value for name, value in got.items() if name.startswith("requests_total/embed")}
    assert ends == {"invalid": 1, "abort": 1, "rejected": 1, "error": 1}
    assert "tokens_total/embed" not in got
    assert "request_latency_seconds_count/embed" not in got
    assert got["queue_time_seconds_count"] == 2


def test_models_share_a_page(metrics):
    for name in ("one", "two"):
        with metrics.of(name).request("embed") as answered:
            answered(1, 5)
    text = metrics.render().decode()
    assert text.count("# TYPE izh:pooling_tokens_total counter") == 1
    assert 'izh:pooling_tokens_total{model_name="two",task="embed"} 5.0' in text
