"""POST /v1/embeddings. Owns: how a body becomes a call of the embedder."""

from typing import Any

from fastapi import APIRouter, Request

from izh.server.schema_pooling import EmbeddingBody
from izh.server.services import Services
from izh.server.sse import while_connected


def routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingBody, request: Request) -> dict[str, Any]:
        answer = services.for_embeddings(body.model, body.asked).embed(
            body.input,
            encoding_format=body.encoding_format,
            dimensions=body.dimensions,
            prompt_name=body.prompt_name,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )
        return await while_connected(request.receive, answer)

    return router
