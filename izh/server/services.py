"""The models beside the generator: which there are, and which one a request means.

Owns: Services. Must not know: routes, what a service computes.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from izh.errors import NotFoundError
from izh.pooling.metrics import PoolingMetrics
from izh.server.errors import shown

if TYPE_CHECKING:
    from izh.pooling.service import PoolingService
    from izh.server.images import Images


@dataclass
class Services:
    """What `Server.embedder`, `Server.reranker` and `Server.multimodal_processor` were set to."""

    embedder: "PoolingService | None" = None
    reranker: "PoolingService | None" = None
    images: "Images | None" = None
    metrics: PoolingMetrics = field(default_factory=PoolingMetrics)
    """What embedder and reranker count."""

    def for_embeddings(self, model: str | None) -> "PoolingService":
        """Raises NotFoundError when nothing embeds here, or not by this name."""
        return _named(self.embedder, model, "embeddings", "--embedder DIR")

    def for_reranking(self, model: str | None) -> "PoolingService":
        """Raises NotFoundError when nothing reranks here, or not by this name."""
        return _named(self.reranker, model, "reranking", "--reranker DIR")

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


def _named(service: "PoolingService | None", model: str | None, task: str, flag: str) -> "PoolingService":
    if service is None:
        raise NotFoundError(f"no model for {task} is served here; start the server with {flag}", "model")
    if model is not None and model != service.model_name:
        raise NotFoundError(
            f"model {shown(model)} is not served here for {task}; served: {service.model_name!r}", "model"
        )
    return service
