"""GET /v1/models. Owns: how what is served is described."""

import time
from typing import Any

from fastapi import APIRouter

from izh.engine.async_llm import AsyncLLM
from izh.server.convert import check_model


def routes(engine: AsyncLLM) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def card() -> dict[str, Any]:
        return {
            "id": engine.info.name,
            "object": "model",
            "created": created,
            "owned_by": "izh",
            "root": engine.info.path,
            "parent": None,
            "max_model_len": engine.info.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(engine, name)
        return card()

    return router
