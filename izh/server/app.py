"""The HTTP server: routes, limits and their life around one engine.

Owns: Server. Must not know: what any route answers.
Invariant: the engine is ready before the port accepts anybody, and is stopped after the last answer.
"""

import asyncio
import importlib
import os
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from izh.config import RESIDENT, ServerOptions
from izh.engine.async_llm import AsyncLLM
from izh.engine.messages import EncoderTask
from izh.errors import OptionError
from izh.logs import configure_logging
from izh.server import adapters, chat, completions, embeddings, errors, health, models, rerank, tokenize
from izh.server.limits import BodyLimit, ConcurrencyLimit, KeyCheck
from izh.server.services import Services
from izh.version import __version__

if TYPE_CHECKING:
    from izh.multimodal.seam import MultimodalProcessor
    from izh.pooling.service import PoolingService
    from izh.server.images import Images
    from izh.server.resident import ResidentServices

_GENERATION = (completions, adapters)
_CONVERSATION = (chat, tokenize, health)
_SERVICES = (embeddings, rerank)
_GRACE_S = 5  # for answers in flight, once the server is told to stop


class Server:
    """OpenAI-compatible HTTP for an engine.

    `app` is the ASGI application, for any ASGI server: its lifespan starts the engine, unless that is done, and shuts
    it down. `run` and `start` serve it with uvicorn.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        options: ServerOptions | None = None,
        *,
        multimodal_processor: "MultimodalProcessor | None" = None,
    ) -> None:
        self.engine = engine
        self.options = options or ServerOptions()
        self._services = Services()
        self.multimodal_processor = multimodal_processor
        self.app = self._build()
        self._uvicorn: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def multimodal_processor(self) -> "MultimodalProcessor | None":
        """What reads the images of conversations; None: image parts are refused. Set it before the server starts."""
        return None if self._services.images is None else self._services.images.processor

    @multimodal_processor.setter
    def multimodal_processor(self, processor: "MultimodalProcessor | None") -> None:
        if self._services.images is not None:
            self._services.images.close()
        self._services.images = None if processor is None else _images(processor, self.options)

    @property
    def embedder(self) -> "PoolingService | None":
        """What answers /v1/embeddings. Set it before the server starts; it is closed with the server."""
        return self._services.embedder

    @embedder.setter
    def embedder(self, service: "PoolingService | None") -> None:
        self._services.embedder = service
        self._count(service)

    @property
    def reranker(self) -> "PoolingService | None":
        """What answers /v1/rerank and /v1/score: a service with a score head. Set and closed as `embedder`."""
        return self._services.reranker

    @reranker.setter
    def reranker(self, service: "PoolingService | None") -> None:
        self._services.reranker = service
        self._count(service)

    def _count(self, service: "PoolingService | None") -> None:
        """Have what it does appear in /metrics."""
        if service is not None:
            service.metrics = self._services.metrics.of(service.model_name)

    def run(self) -> None:
        """Serve until interrupted. Raises ModelLoadError or OptionError when that cannot start."""
        configure_logging()
        asyncio.run(self._run())

    async def start(self) -> str:
        """Start the engine and listen, on the running loop; returns the URL. `stop` ends both."""
        port = _bind(self.options.host, self.options.port)  # first: loading a model for a taken port would be in vain
        try:
            await self._start_models()
        except BaseException:
            port.close()
            await self._end()
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
            await self._start_models()
        try:
            yield
        finally:
            await self._end()

    async def _end(self) -> None:
        """The engine first: threads of the services may be waiting for it."""
        await self.engine.shutdown()
        await asyncio.to_thread(self._services.close)

    async def _start_models(self) -> None:
        """All of it takes seconds: side by side. What the options name and nobody has set runs in the engine process;
        its texts are read here."""
        named: dict[EncoderTask, str | None] = {"embed": self.options.embedder, "rerank": self.options.reranker}
        given: dict[EncoderTask, PoolingService | None] = {"embed": self.embedder, "rerank": self.reranker}
        beside = {
            task: directory
            for task, directory in named.items()
            if directory is not None and directory != RESIDENT and given[task] is None
        }
        if self.options.embedder is not None or self.options.reranker is not None:
            # Both import it, in threads; two at once would find its lazy module half made.
            await asyncio.to_thread(importlib.import_module, "transformers")
        await asyncio.gather(self.engine.start(beside), self._load_services(beside))
        if self.multimodal_processor is None:
            self.multimodal_processor = await asyncio.to_thread(_load_eyes, self.engine, self.options)
        self._services.resident = await asyncio.to_thread(_resident, self.engine, self.options, self._services)
        taken = {self.engine.info.name, *self.engine.info.adapters}
        if doubled := taken.intersection(self._services.names):
            raise OptionError(f"two models here are named {doubled.pop()!r}; choose another --served-model-name")

    async def _load_services(self, beside: Mapping[EncoderTask, str]) -> None:
        from izh.server.beside import load_beside  # torch comes with it

        for task, directory in beside.items():
            service = await load_beside(self.engine, task, directory, self.options)
            if task == "embed":
                self.embedder = service
            else:
                self.reranker = service

    def _build(self) -> FastAPI:
        app = FastAPI(title="izh", version=__version__, lifespan=self._lifespan)
        errors.handle(app)
        app.include_router(models.routes(self.engine, self._services))
        for module in _GENERATION:
            app.include_router(module.routes(self.engine))
        for route in _CONVERSATION:
            app.include_router(route.routes(self.engine, self._services))
        for service in _SERVICES:
            app.include_router(service.routes(self._services))
        # The layer added last is passed first.
        app.add_middleware(BodyLimit, max_bytes=int(self.options.max_body_mb * 2**20))
        app.add_middleware(ConcurrencyLimit, limit=self.options.max_concurrent_requests)
        if key := _api_key(self.options):
            app.add_middleware(KeyCheck, key=key)
        return app


def _images(processor: "MultimodalProcessor", options: ServerOptions) -> "Images":
    from izh.server.images import Images  # torch comes with it

    return Images(processor, options)


def _load_eyes(engine: AsyncLLM, options: ServerOptions) -> "MultimodalProcessor | None":
    from izh.server.eyes import load_eyes  # torch comes with it

    return load_eyes(engine.info.path, engine.tokenizer, options.vision)


def _resident(engine: AsyncLLM, options: ServerOptions, services: Services) -> "ResidentServices":
    from izh.server.resident import ResidentServices  # torch comes with it

    return ResidentServices(engine, reranks=options.reranker == RESIDENT, metrics=services.metrics)


def _api_key(options: ServerOptions) -> str | None:
    if options.api_key == "":
        raise OptionError("api_key is empty: give a key, or leave the option out to serve without one")
    return options.api_key or os.environ.get("IZH_API_KEY") or None


def _bind(host: str, number: int) -> socket.socket:
    """A socket that holds the port and does not listen yet. Raises OptionError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP by name, or asyncio leaves Nagle's algorithm on, which holds each answer back for the last one's ACK: 40 ms.
    port = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind((host, number))
    except (OSError, OverflowError) as error:  # OverflowError: a number that no port has
        port.close()
        raise OptionError(f"cannot listen on {host}:{number} ({error}); choose another --host or --port") from error
    return port
