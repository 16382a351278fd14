"""What the pooling services of a server tell Prometheus.

Owns: PoolingMetrics: every series' name, help and buckets, in a registry of its own; PoolingSeries, one model's part.
Must not know: HTTP, tensors, how anything is computed. Services and their threads feed it; `/metrics` renders it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from izh.errors import OverloadedError, RequestError

Task = Literal["embed", "rerank"]

_MODEL, _TASK = "model_name", "task"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class PoolingMetrics:
    """The series of all pooling services of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"izh:pooling_{name}", text, [_MODEL, *labels], registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"izh:pooling_{name}", text, [_MODEL, *labels], registry=registry, buckets=buckets)

        self.requests = counter(
            "requests",
            "Ended requests by outcome: success, invalid (400), rejected (429: too much was waiting), abort (client "
            "gone) or error.",
            _TASK,
            "outcome",
        )
        self.inputs = counter("inputs", "Texts, or pairs of query and document, of answered requests.", _TASK)
        self.tokens = counter("tokens", "Tokens of answered requests.", _TASK)
        self.latency = histogram(
            "request_latency_seconds", "From arrival to the answer, of answered requests.", _SECONDS, _TASK
        )
        self.queue = histogram("queue_time_seconds", "From arrival to the first computation.", _SECONDS)
        self.batch_tokens = histogram("batch_tokens", "Tokens computed in one batch.", _TOKENS)

    def of(self, model_name: str) -> "PoolingSeries":
        """The series of one model."""
        return PoolingSeries(self, model_name)

    def render(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self._registry)


class PoolingSeries:
    """The series of one model. Safe to feed from any thread."""

    def __init__(self, metrics: PoolingMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._model = model_name
        self._queue = metrics.queue.labels(model_name)
        self._batch_tokens = metrics.batch_tokens.labels(model_name)

    def batch(self, waits_s: list[float], num_tokens: int) -> None:
        """A batch is about to be computed; `waits_s` are those of the requests that begin with it."""
        self._batch_tokens.observe(num_tokens)
        for wait_s in waits_s:
            self._queue.observe(wait_s)

    @contextmanager
    def request(self, task: Task) -> Iterator[Callable[[int, int], None]]:
        """Around one request, from its arrival to its answer or error. What it yields takes the number of its inputs
        and of their tokens, once there is an answer."""
        start = time.monotonic()
        outcome = "abort"  # a cancelled task ends with what is no Exception
        try:
            yield lambda num_inputs, num_tokens: self._answered(task, num_inputs, num_tokens, time.monotonic() - start)
            outcome = "success"
        except OverloadedError:
            outcome = "rejected"
            raise
        except RequestError:
            outcome = "invalid"
            raise
        except Exception:
            outcome = "error"
            raise
        finally:
            self._metrics.requests.labels(self._model, task, outcome).inc()

    def _answered(self, task: Task, num_inputs: int, num_tokens: int, seconds: float) -> None:
        self._metrics.inputs.labels(self._model, task).inc(num_inputs)
        self._metrics.tokens.labels(self._model, task).inc(num_tokens)
        self._metrics.latency.labels(self._model, task).observe(seconds)
