"""POST /v1/embeddings. Owns: how a body becomes a call of the embedder."""

from typing import Any

from fastapi import APIRouter

from izh.server.schema_pooling import EmbeddingBody
from izh.server.services import Services


def routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingBody) -> dict[str, Any]:
        return await services.for_embeddings(body.model).embed(
            body.input,
            encoding_format=body.encoding_format,
            dimensions=body.dimensions,
            prompt_name=body.prompt_name,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )

    return router
