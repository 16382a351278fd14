"""The HTTP server: routes, limits and their life around one engine.

Owns: Server. Must not know: what any route answers.
Invariant: the engine is ready before the port is open, and is stopped after the last answer.
"""

import asyncio
import os

import uvicorn
from fastapi import FastAPI

from izh.config import ServerOptions
from izh.engine.async_llm import AsyncLLM
from izh.logs import configure_logging
from izh.server import chat, completions, errors, health, models, tokenize
from izh.server.limits import BodyLimit, ConcurrencyLimit, KeyCheck
from izh.version import __version__

_ROUTES = (chat, completions, models, tokenize, health)


class Server:
    """OpenAI-compatible HTTP for an engine. `app` is the ASGI application; it expects the engine to be started."""

    def __init__(self, engine: AsyncLLM, options: ServerOptions | None = None) -> None:
        self.engine = engine
        self.options = options or ServerOptions()
        self.app = self._build()
        self._uvicorn: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Serve until interrupted. Raises ModelLoadError or OptionError when the engine cannot start."""
        configure_logging()
        asyncio.run(self._run())

    async def start(self) -> str:
        """Start the engine and listen, on the running loop; returns the URL. `stop` ends both."""
        await self.engine.start()
        options = self.options
        config = uvicorn.Config(
            self.app, host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=5
        )
        self._uvicorn = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._uvicorn.serve())
        while not self._uvicorn.started:
            if self._serving.done():  # the port is taken: uvicorn has logged it and raises or returns
                await self.stop()
                raise OSError(f"cannot listen on {options.host}:{options.port}; choose another --port")
            await asyncio.sleep(0.01)
        host, port = self._uvicorn.servers[0].sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        """Stop listening, then stop the engine."""
        if self._uvicorn is not None and self._serving is not None:
            self._uvicorn.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
        await self.engine.shutdown()

    async def _run(self) -> None:
        url = await self.start()
        print(f"izh {__version__} serves {self.engine.info.name!r} at {url}  (OpenAI-compatible: {url}/v1)", flush=True)
        try:
            assert self._serving is not None
            await self._serving  # until a signal: uvicorn handles SIGINT and SIGTERM
        finally:
            await self.stop()

    def _build(self) -> FastAPI:
        app = FastAPI(title="izh", version=__version__)
        errors.handle(app)
        for module in _ROUTES:
            app.include_router(module.routes(self.engine))
        # The layer added last is passed first.
        app.add_middleware(BodyLimit, max_bytes=int(self.options.max_body_mb * 2**20))
        app.add_middleware(ConcurrencyLimit, limit=self.options.max_concurrent_requests)
        key = self.options.api_key or os.environ.get("IZH_API_KEY")
        if key:
            app.add_middleware(KeyCheck, key=key)
        return app
