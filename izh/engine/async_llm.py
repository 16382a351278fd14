"""The asynchronous face: requests from one event loop, the engine in a process of its own.

Owns: the table of live requests, the engine process's supervision, and what users see of both.
Must not know: HTTP, tensors (importing this module imports no torch).
Invariant: every `generate` ends, with its last output or an exception, also when the engine process dies.

    generate -> tokenizer -> Add ..................................> engine process
    caller  <- its queue <- OutputProcessor <- _supervise <- Stepped <-/
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from izh.config import EngineOptions, lora_directories
from izh.engine.core_process import CoreProcess
from izh.engine.messages import Abort, Add, Ready, ResetPrefixCache, Start, Stepped
from izh.engine.metrics import Metrics
from izh.errors import EngineDeadError, IzhError, RequestError, error_of
from izh.model.source import ModelSource, resolve
from izh.outputs import RequestOutput
from izh.request import FinishReason, SamplingParams, choices_of
from izh.text.output import OutputProcessor
from izh.text.tokenizer import Tokenizer

log = logging.getLogger("izh.frontend")

State = Literal["starting", "ready", "dead"]
_RESTART_DELAY_S = (0.0, 1.0, 5.0, 15.0)  # before the first, second, ... restart in a row; the last one repeats
_LONG_TEXT = 4096  # characters from which tokenizing leaves the event loop


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What is served. `max_model_len` counts prompt and answer tokens."""

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    adapters: Mapping[str, Path] = field(default_factory=dict)  # directories of those that requests may name


@dataclass(slots=True)
class _Stream:
    """A live request on its way to its caller, with what the metrics will want to know."""

    queue: asyncio.Queue[RequestOutput | IzhError] = field(default_factory=asyncio.Queue)
    arrival_s: float = 0.0
    first_token_s: float | None = None
    num_generated: int = 0
    reason: FinishReason = "abort"


class AsyncLLM:
    """Serves one model from a process of its own.

    Options as keywords or as one EngineOptions. Call `start` once before `generate` and `shutdown` at the end, all on
    one event loop.
    """

    tokenizer: Tokenizer
    info: ModelInfo
    metrics: Metrics

    def __init__(self, options: EngineOptions | None = None, **kwargs: Any) -> None:
        self._options = options or EngineOptions(**kwargs)
        self._streams: dict[str, _Stream] = {}
        self._core: CoreProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self.state: State = "starting"

    async def start(self) -> None:
        """Find the model, load the tokenizer, start the engine process. Raises ModelLoadError, OptionError."""
        source = await asyncio.to_thread(resolve, self._options.model, self._options.revision)
        start = Start(options=self._options, path=str(source.path), name=source.name, kind=source.kind)
        # Both take seconds: side by side.
        tokenizer = asyncio.ensure_future(asyncio.to_thread(Tokenizer.load, source.path))
        try:
            self._core, ready = await CoreProcess.launch(start)
            self.tokenizer = await tokenizer
        except BaseException:
            tokenizer.cancel()
            await self.shutdown()
            raise
        self.info = self._describe(source, ready)
        self.metrics = Metrics(self.info.name)
        self._processor = OutputProcessor(self.tokenizer)
        self._supervisor = asyncio.create_task(self._supervise(start))
        self.state = "ready"

    async def shutdown(self) -> None:
        """Stop the engine process; live requests end with EngineDeadError."""
        self.state = "dead"
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        self._fail_all(EngineDeadError("the engine is shut down"))
        if self._core is not None:
            await self._core.stop()
            self._core = None

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapters: tuple[tuple[str, float], ...] = (),
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield what is new, step by step (RequestOutput.add sums it up). `adapters` are names and scales, summed.

        Raises, before the first item, RequestError (ContextLengthError, ...) for a request that cannot be; at any time
        EngineDeadError when the engine process dies and IzhError when the request's step fails. Closing the generator,
        or cancelling the task that reads it, aborts the request.
        """
        arrival_s = time.monotonic()
        token_ids = prompt if isinstance(prompt, list) else await self._encode(prompt)
        core = self._core
        if core is None or self.state != "ready":
            raise EngineDeadError(f"the engine is not ready (state: {self.state}); try again shortly")
        request_id = request_id or f"req-{uuid.uuid4().hex}"
        if request_id in self._streams:  # before anything is made for it: all of that is the live request's own
            raise RequestError(f"request_id {request_id!r} is in use by a request that has not ended", "request_id")
        stream = self._streams[request_id] = _Stream(arrival_s=arrival_s)
        try:
            text = prompt if isinstance(prompt, str) else None
            self._processor.add(request_id, token_ids, params, text)
            requests = choices_of(
                request_id,
                token_ids,
                params,
                arrival_s,
                priority=priority,
                cache_salt=cache_salt,
                adapters=adapters,
            )
            await core.send(Add(requests=requests))
            while True:
                item = await stream.queue.get()
                if isinstance(item, IzhError):
                    stream.reason = "error"
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            del self._streams[request_id]
            live = self._processor.abort(request_id)
            if live:
                # Not awaited: this may run inside a cancelled task, and the send only queues.
                _detach(core.send(Abort(request_ids=live)))
            self._observe_end(stream, len(token_ids))

    @property
    def engine_pid(self) -> int | None:
        """The engine process's id, None while there is none."""
        return self._core.pid if self._core is not None else None

    async def reset_prefix_cache(self) -> None:
        """Make later requests reuse nothing computed so far."""
        if self._core is not None:
            await self._core.send(ResetPrefixCache())

    # -- the engine process -----------------------------------------------------------------------------------------

    async def _supervise(self, start: Start) -> None:
        """Deliver what the engine says; when it dies, fail what was live and start another. Never returns."""
        failures = 0
        while True:
            assert self._core is not None
            try:
                while True:
                    message = await self._core.receive()
                    assert isinstance(message, Stepped)
                    failures = 0
                    await self._deliver(message)
            except EngineDeadError as error:
                log.error("%s; %d live requests fail, starting another", error, len(self._streams))
                self.state = "dead"
                self._fail_all(error)
            while self.state != "ready":
                await asyncio.sleep(_RESTART_DELAY_S[min(failures, len(_RESTART_DELAY_S) - 1)])
                failures += 1
                try:
                    self._core, _ready = await CoreProcess.launch(start)
                    self.state = "ready"
                except IzhError as error:
                    log.error("the engine did not come back: %s", error)

    async def _deliver(self, message: Stepped) -> None:
        self.metrics.stats(message.stats)
        now = time.monotonic()
        for output in message.outputs:
            stream = self._streams.get(output.request_id.rpartition("/")[0])
            if stream is None:
                continue
            if output.queue_s is not None and stream.first_token_s is None:
                stream.first_token_s = now
                self.metrics.first_token(now - stream.arrival_s, output.queue_s)
            stream.num_generated += len(output.token_ids)
        processed = self._processor.process(message.outputs)
        for item in processed.ready:
            ready = self._streams.get(item.request_id)
            if ready is not None:
                if item.finished:
                    ready.reason = next((o.finish_reason for o in item.outputs if o.finish_reason), "stop")
                ready.queue.put_nowait(item)
        for request_id, finish in processed.failed:
            failed = self._streams.get(request_id)
            if failed is not None:
                failed.queue.put_nowait(error_of(finish.kind, finish.error or "unknown error", finish.param))
        if processed.abort and self._core is not None:
            await self._core.send(Abort(request_ids=processed.abort))

    def _fail_all(self, error: IzhError) -> None:
        for stream in self._streams.values():
            stream.queue.put_nowait(error)

    # -- small parts --------------------------------------------------------------------------------------------------

    async def _encode(self, text: str) -> list[int]:
        if len(text) < _LONG_TEXT:
            return self.tokenizer.encode(text)
        return await asyncio.to_thread(self.tokenizer.encode, text)

    def _describe(self, source: ModelSource, ready: Ready) -> ModelInfo:
        return ModelInfo(
            name=self._options.served_model_name or source.name,
            adapters=lora_directories(self._options),
            path=str(source.path),
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
        )

    def _observe_end(self, stream: _Stream, num_prompt: int) -> None:
        now = time.monotonic()
        per_token = None
        if stream.first_token_s is not None and stream.num_generated > 1:
            per_token = (now - stream.first_token_s) / (stream.num_generated - 1)
        self.metrics.finished(stream.reason, num_prompt, stream.num_generated, now - stream.arrival_s, per_token)


_detached: set[asyncio.Task[None]] = set()


def _detach(work: Any) -> None:
    """Run a coroutine on its own; the set keeps the task from being collected before it is done."""
    task = asyncio.ensure_future(work)
    _detached.add(task)
    task.add_done_callback(_detached.discard)
