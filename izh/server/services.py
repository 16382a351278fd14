"""The models beside the generator, and what the generator does besides: which there are, and which one a request means.

Owns: Services. Must not know: routes, what a service computes.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from izh.errors import NotFoundError, RequestError
from izh.pooling.metrics import PoolingMetrics
from izh.server.asked import Asked
from izh.server.errors import shown

if TYPE_CHECKING:
    from izh.pooling.service import PoolingService
    from izh.server.images import Images
    from izh.server.resident import ResidentServices


@dataclass
class Services:
    """What `Server.embedder`, `Server.reranker` and `Server.multimodal_processor` were set to. `resident` is the
    generator, as what embeds and reranks; it is there once the engine is."""

    embedder: "PoolingService | None" = None
    reranker: "PoolingService | None" = None
    images: "Images | None" = None
    resident: "ResidentServices | None" = None
    metrics: PoolingMetrics = field(default_factory=PoolingMetrics)
    """What embedder and reranker count."""

    def for_embeddings(self, model: str | None, asked: Asked) -> "PoolingService":
        """By name; without one the embedder, or the generator if there is none. Raises NotFoundError when nothing
        embeds here, or not by this name; RequestError when it cannot do what is asked."""
        return _named(self.embedder, self.resident, "embed", model, asked)

    def for_reranking(self, model: str | None, asked: Asked) -> "PoolingService":
        """As `for_embeddings`; the generator only reranks if it was told to."""
        judge = self.resident if self.resident is not None and self.resident.reranks else None
        return _named(self.reranker, judge, "rerank", model, asked)

    @property
    def names(self) -> list[str]:
        """The models here, each once."""
        return list(dict.fromkeys(each.model_name for each in (self.embedder, self.reranker) if each is not None))

    def named(self, name: str) -> "tuple[PoolingService, list[str]]":
        """A model here, and what it can do."""
        given = {"embed": self.embedder, "rerank": self.reranker}
        found = {task: each for task, each in given.items() if each is not None and each.model_name == name}
        return next(iter(found.values())), list(found)

    def close(self) -> None:
        """End the threads that compute."""
        for service in (self.embedder, self.reranker, self.images):
            if service is not None:
                service.close()


_TASKS = {"embed": ("embeddings", "--embedder DIR"), "rerank": ("reranking", "--reranker DIR")}


def _named(
    beside: "PoolingService | None", resident: "ResidentServices | None", task: str, model: str | None, asked: Asked
) -> "PoolingService":
    """The service of that name among a model beside the generator and the generator with its adapters."""
    if beside is not None and model in (None, beside.model_name):
        if asked.param is not None:
            raise RequestError(
                f"{asked.param}: model {beside.model_name!r} runs beside the generator, in the order that requests "
                "come and with neither adapters nor a prefix cache; leave it out",
                asked.param,
            )
        return beside
    if resident is not None and (model is None or model in resident.names):
        return resident.embedder(model, asked) if task == "embed" else resident.reranker(model, asked)
    what, flag = _TASKS[task]
    served = ([] if beside is None else [beside.model_name]) + ([] if resident is None else resident.names)
    if not served:
        raise NotFoundError(f"no model for {what} is served here; start the server with {flag}", "model")
    raise NotFoundError(
        f"model {shown(model)} is not served here for {what}; served: {', '.join(map(repr, served))}", "model"
    )
