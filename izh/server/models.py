"""GET /v1/models. Owns: how what is served is described."""

import time
from typing import Any

from fastapi import APIRouter

from izh.engine.async_llm import AsyncLLM
from izh.server.convert import check_model


def routes(engine: AsyncLLM) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        adapter = engine.info.adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "izh",
            "root": engine.info.path if adapter is None else str(adapter),
            "parent": None if adapter is None else engine.info.name,
            "max_model_len": engine.info.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in (engine.info.name, *engine.info.adapters)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(engine, name)
        return card(name)

    return router
