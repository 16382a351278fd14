"""GET /v1/models. Owns: how what is served is described."""

import time
from typing import Any

from fastapi import APIRouter

from izh.engine.async_llm import AsyncLLM
from izh.server.convert import check_model
from izh.server.services import Services


def routes(engine: AsyncLLM, services: Services) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def generator(name: str) -> dict[str, Any]:
        adapter = engine.info.adapters.get(name)
        return {
            "root": engine.info.path if adapter is None else str(adapter),
            "parent": None if adapter is None else engine.info.name,
            "max_model_len": engine.info.max_model_len,
            "tasks": tasks(),
            "input_modalities": ["text"] if services.images is None else ["text", "image"],
        }

    def tasks() -> list[str]:
        """What the generator does: with or without an adapter the same."""
        resident = services.resident
        can = {
            "generate": engine.info.generates,
            "embed": resident is not None,
            "rerank": resident is not None and resident.reranks,
        }
        return [task for task, does in can.items() if does]

    def service(name: str) -> dict[str, Any]:
        found, tasks = services.named(name)
        return {
            "root": name,
            "parent": None,
            "max_model_len": found.max_model_len,
            "tasks": tasks,
            "input_modalities": ["text"],
        }

    def card(name: str) -> dict[str, Any]:
        more = service(name) if name in services.names else generator(name)
        return {"id": name, "object": "model", "created": created, "owned_by": "izh"} | more

    def names() -> list[str]:
        return [engine.info.name, *engine.info.adapters, *services.names]

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in names()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in services.names:
            check_model(engine, name)
        return card(name)

    return router
