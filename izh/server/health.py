"""GET /health, /ping, /version, /metrics. Owns: what probes and dashboards read; open to everybody."""

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from izh.engine.async_llm import AsyncLLM
from izh.server.services import Services
from izh.version import __version__


def routes(engine: AsyncLLM, services: Services) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    async def health() -> Response:
        """200 while requests are answered, 503 with the engine's state otherwise."""
        return JSONResponse({"status": engine.state}, 200 if engine.state == "ready" else 503)

    @router.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": __version__}

    @router.get("/metrics")
    async def metrics() -> Response:
        if services.images is not None:
            counts = services.images.counts
            engine.metrics.image_cache(counts.hits, counts.misses, counts.num_bytes, counts.num_entries)
        return Response(engine.metrics.render() + services.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router
