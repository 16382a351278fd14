"""The HTTP server: routes, limits and their life around one engine.

Owns: Server. Must not know: what any route answers.
Invariant: the engine is ready before the port accepts anybody, and is stopped after the last answer.
"""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from izh.config import ServerOptions
from izh.engine.async_llm import AsyncLLM
from izh.errors import OptionError
from izh.logs import configure_logging
from izh.server import adapters, chat, completions, errors, health, models, tokenize
from izh.server.limits import BodyLimit, ConcurrencyLimit, KeyCheck
from izh.version import __version__

_ROUTES = (chat, completions, models, adapters, tokenize, health)
_GRACE_S = 5  # for answers in flight, once the server is told to stop


class Server:
    """OpenAI-compatible HTTP for an engine.

    `app` is the ASGI application, for any ASGI server: its lifespan starts the engine, unless that is done, and shuts
    it down. `run` and `start` serve it with uvicorn.
    """

    def __init__(self, engine: AsyncLLM, options: ServerOptions | None = None) -> None:
        self.engine = engine
        self.options = options or ServerOptions()
        self.app = self._build()
        self._uvicorn: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Serve until interrupted. Raises ModelLoadError or OptionError when that cannot start."""
        configure_logging()
        asyncio.run(self._run())

    async def start(self) -> str:
        """Start the engine and listen, on the running loop; returns the URL. `stop` ends both."""
        port = _bind(self.options.host, self.options.port)  # first: loading a model for a taken port would be in vain
        try:
            await self.engine.start()
        except BaseException:
            port.close()
            raise
        config = uvicorn.Config(self.app, log_level="warning", timeout_graceful_shutdown=_GRACE_S)
        self._uvicorn = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=[port]))
        while not self._uvicorn.started:
            if self._serving.done():
                await self._serving
            await asyncio.sleep(0.01)
        host, number = port.getsockname()[:2]
        return f"http://[{host}]:{number}" if ":" in host else f"http://{host}:{number}"

    async def stop(self) -> None:
        """Stop listening, give answers in flight a moment, then stop the engine."""
        if self._uvicorn is not None and self._serving is not None:
            self._uvicorn.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)

    async def _run(self) -> None:
        url = await self.start()
        print(f"izh {__version__} serves {self.engine.info.name!r} at {url}  (OpenAI-compatible: {url}/v1)", flush=True)
        assert self._serving is not None
        try:
            await self._serving  # until SIGINT or SIGTERM, which uvicorn handles, and raises again when all is stopped
        finally:
            await self.stop()

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncGenerator[None, None]:
        if self.engine.state == "starting":
            await self.engine.start()
        try:
            yield
        finally:
            await self.engine.shutdown()

    def _build(self) -> FastAPI:
        app = FastAPI(title="izh", version=__version__, lifespan=self._lifespan)
        errors.handle(app)
        for module in _ROUTES:
            app.include_router(module.routes(self.engine))
        # The layer added last is passed first.
        app.add_middleware(BodyLimit, max_bytes=int(self.options.max_body_mb * 2**20))
        app.add_middleware(ConcurrencyLimit, limit=self.options.max_concurrent_requests)
        if key := _api_key(self.options):
            app.add_middleware(KeyCheck, key=key)
        return app


def _api_key(options: ServerOptions) -> str | None:
    if options.api_key == "":
        raise OptionError("api_key is empty: give a key, or leave the option out to serve without one")
    return options.api_key or os.environ.get("IZH_API_KEY") or None


def _bind(host: str, number: int) -> socket.socket:
    """A socket that holds the port and does not listen yet. Raises OptionError."""
    port = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind((host, number))
    except (OSError, OverflowError) as error:  # OverflowError: a number that no port has
        port.close()
        raise OptionError(f"cannot listen on {host}:{number} ({error}); choose another --host or --port") from error
    return port
