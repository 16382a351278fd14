"""The asynchronous face: requests from one event loop, the engine in a process of its own.

Owns: the table of live requests, the engine process's supervision, and what users see of both.
Must not know: HTTP, tensors (importing this module imports no torch).
Invariant: every `generate` and `embed` ends, with its last output or an exception, also when the engine process dies.

    generate, embed -> Add ........................................> engine process
    caller  <- its queue <- OutputProcessor <- _supervise <- Stepped <-/
"""

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from izh.config import EngineOptions
from izh.engine.core_process import CoreProcess
from izh.engine.info import ModelInfo, describe, paths
from izh.engine.messages import (
    Abort,
    Add,
    Encode,
    Encoded,
    EncoderTask,
    LoadAdapter,
    Ready,
    Replied,
    ResetPrefixCache,
    Start,
    Stepped,
    UnloadAdapter,
)
from izh.engine.metrics import Metrics
from izh.errors import AdapterError, EngineDeadError, IzhError, RequestError, error_of
from izh.model.source import resolve
from izh.outputs import PoolingOutput, RequestOutput
from izh.request import Entry, FinishReason, PackedFeatures, PoolingParams, SamplingParams, choices_of
from izh.text.output import OutputProcessor
from izh.text.tokenizer import Tokenizer

log = logging.getLogger("izh.frontend")

State = Literal["starting", "ready", "dead"]
_RESTART_DELAY_S = (0.0, 1.0, 5.0, 15.0)  # before the first, second, ... restart in a row; the last one repeats
_LONG_TEXT = 4096  # characters from which tokenizing leaves the event loop


@dataclass(slots=True)
class _Stream:
    """A live request on its way to its caller, with what the metrics will want to know."""

    queue: asyncio.Queue[RequestOutput | PoolingOutput | IzhError] = field(default_factory=asyncio.Queue)
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
        self._calls: dict[int, asyncio.Future[Any]] = {}  # commands without a reply yet
        self._call_ids = itertools.count()
        self._core: CoreProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self.state: State = "starting"

    async def start(self, encoders: Mapping[EncoderTask, str] | None = None) -> None:
        """Find the model, load the tokenizer, start the engine process. `encoders` are models beside the generator, by
        what they do: a directory, or "demo". Raises ModelLoadError, AdapterError, OptionError."""
        source = await asyncio.to_thread(resolve, self._options.model, self._options.revision)
        start = Start(
            options=self._options,
            path=str(source.path),
            name=source.name,
            kind=source.kind,
            adapters={name: str(directory) for name, directory in source.adapters.items()},
            encoders=dict(encoders or {}),
        )
        # Both take seconds: side by side.
        tokenizer = asyncio.ensure_future(asyncio.to_thread(Tokenizer.load, source.path))
        try:
            self._core, ready = await CoreProcess.launch(start)
            self.tokenizer = await tokenizer
            self.info = describe(self._options, source, ready)
        except BaseException:
            tokenizer.cancel()
            await self.shutdown()
            raise
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
        features: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield what is new, step by step (RequestOutput.add sums it up). `adapters` are names and scales, summed.
        `features` are those of a prompt with images (`VisionPrompt.features`), whose token ids are then the prompt.

        Raises, before the first item, RequestError (ContextLengthError, ...) for a request that cannot be; at any time
        EngineDeadError when the engine process dies and IzhError when the request's step fails. Closing the generator,
        or cancelling the task that reads it, aborts the request.
        """
        packed = None if features is None else await asyncio.to_thread(_pack, features)
        asked = self._ask(prompt, params, request_id, priority, cache_salt, adapters, packed)
        async with contextlib.aclosing(asked):
            async for item in asked:
                assert isinstance(item, RequestOutput)
                yield item

    async def embed(
        self,
        prompt: str | list[int],
        params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapters: tuple[tuple[str, float], ...] = (),
    ) -> PoolingOutput:
        """The vector of a prompt, computed in the same steps as answers are; by default of its last token, of length 1.
        Arguments, errors and what cancelling does: as of `generate`."""
        asked = self._ask(prompt, params or PoolingParams(), request_id, priority, cache_salt, adapters, None)
        async with contextlib.aclosing(asked):
            item = await anext(asked)
            assert isinstance(item, PoolingOutput)
            return item

    async def _ask(
        self,
        prompt: str | list[int],
        params: SamplingParams | PoolingParams,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        adapters: tuple[tuple[str, float], ...],
        features: PackedFeatures | None,
    ) -> AsyncGenerator[RequestOutput | PoolingOutput, None]:
        """A request from its admission to its end: what both of its kinds have in common."""
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
            if isinstance(params, SamplingParams):
                self._processor.add(request_id, token_ids, params, prompt if isinstance(prompt, str) else None)
            else:
                self._processor.add_pooled(request_id, token_ids)
            requests = choices_of(
                request_id,
                token_ids,
                params,
                arrival_s,
                priority=priority,
                cache_salt=cache_salt,
                adapters=adapters,
            )
            await core.send(Add(requests=requests, features=features))
            while True:
                item = await stream.queue.get()
                if isinstance(item, IzhError):
                    stream.reason = "error"
                    raise item
                yield item
                if isinstance(item, PoolingOutput) or item.finished:
                    return
        finally:
            del self._streams[request_id]
            live = self._processor.abort(request_id)
            if live:
                # Not awaited: this may run inside a cancelled task, and the send only queues.
                _detach(core.send(Abort(request_ids=live)))
            self._observe_end(stream, len(token_ids))

    async def encode(self, encoder: EncoderTask, entries: list[Entry]) -> list[bytes]:
        """What an encoder that the engine was started with makes of each entry, between the steps of the requests that
        run: a vector or raw score, float32. Raises EngineDeadError, IzhError."""
        results: list[bytes] = await self._call(Encode(call_id=next(self._call_ids), encoder=encoder, entries=entries))
        return results

    async def load_lora(self, name: str, directory: str | Path, *, replace: bool = False) -> None:
        """Let requests name the adapter of this directory from now on. With `replace` it takes the place of another;
        requests that run keep the weights they began with.

        Raises AdapterError, with nothing changed: for a name that is taken, an adapter that does not fit, or an engine
        started without adapters.
        """
        if not name.isprintable() or not name.strip():
            raise AdapterError(f"an adapter's name must be printable text, got {name!r}")
        if name == self.info.name:
            raise AdapterError(f"{name!r} is the base model's name; an adapter's name must be its own")
        where = str(Path(directory).expanduser().absolute())
        await self._call(LoadAdapter(call_id=next(self._call_ids), name=name, directory=where, replace=replace))

    async def unload_lora(self, name: str) -> None:
        """Forget an adapter. Raises NotFoundError for an unknown name, AdapterInUseError while requests use it."""
        await self._call(UnloadAdapter(call_id=next(self._call_ids), name=name))

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
                    failures = 0
                    if isinstance(message, Replied):
                        self._conclude(message)
                    elif isinstance(message, Encoded):
                        self._answer(message, message.results)
                    else:
                        assert isinstance(message, Stepped)
                        await self._deliver(message)
            except EngineDeadError as error:
                log.error("%s; %d live requests fail, starting another", error, len(self._streams))
                self.state = "dead"
                self._fail_all(error)
            while self.state != "ready":
                await asyncio.sleep(_RESTART_DELAY_S[min(failures, len(_RESTART_DELAY_S) - 1)])
                failures += 1
                try:
                    self._core, ready = await CoreProcess.launch(start)
                    await self._restore_adapters(self._core, ready)
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
            if output.queue_s is not None and stream.first_token_s is None and output.token_ids:
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
        for vector in processed.pooled:
            waiting = self._streams.get(vector.request_id)
            if waiting is not None:
                waiting.reason = "stop"
                waiting.queue.put_nowait(vector)
        for request_id, finish in processed.failed:
            failed = self._streams.get(request_id)
            if failed is not None:
                failed.queue.put_nowait(error_of(finish.kind, finish.error or "unknown error", finish.param))
        if processed.abort and self._core is not None:
            await self._core.send(Abort(request_ids=processed.abort))

    async def _call(self, command: LoadAdapter | UnloadAdapter | Encode) -> Any:
        """Send a command and wait for its reply's result. Raises the error that it replies with."""
        core = self._core
        if core is None or self.state != "ready":
            raise EngineDeadError(f"the engine is not ready (state: {self.state}); try again shortly")
        reply = self._calls[command.call_id] = asyncio.get_running_loop().create_future()
        try:
            await core.send(command)
            return await reply
        finally:
            del self._calls[command.call_id]

    def _conclude(self, reply: Replied) -> None:
        self.info = replace(self.info, adapters=paths(reply.adapters))
        self._answer(reply, None)

    def _answer(self, reply: Replied | Encoded, result: Any) -> None:
        call = self._calls.get(reply.call_id)
        if call is None or call.done():  # whoever called has gone
            return
        if reply.error is None:
            call.set_result(result)
        else:
            call.set_exception(error_of(reply.kind, reply.error))

    async def _restore_adapters(self, core: CoreProcess, ready: Ready) -> None:
        """Let a new engine process know what the old one knew. What cannot be loaded any more is logged and gone."""
        wanted, known = self.info.adapters, paths(ready.adapters)
        commands: list[LoadAdapter | UnloadAdapter] = [
            LoadAdapter(call_id=next(self._call_ids), name=name, directory=str(directory), replace=True)
            for name, directory in wanted.items()
            if known.get(name) != directory
        ]
        commands += [UnloadAdapter(call_id=next(self._call_ids), name=name) for name in known if name not in wanted]
        for command in commands:
            await core.send(command)
            reply = await core.receive()
            assert isinstance(reply, Replied)
            if reply.error is not None:
                log.error("adapter %r was not restored: %s", command.name, reply.error)
            known = paths(reply.adapters)
        self.info = replace(self.info, adapters=known)

    def _fail_all(self, error: IzhError) -> None:
        for stream in self._streams.values():
            stream.queue.put_nowait(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)

    # -- small parts --------------------------------------------------------------------------------------------------

    async def _encode(self, text: str) -> list[int]:
        if len(text) < _LONG_TEXT:
            return self.tokenizer.encode(text)
        return await asyncio.to_thread(self.tokenizer.encode, text)

    def _observe_end(self, stream: _Stream, num_prompt: int) -> None:
        now = time.monotonic()
        per_token = None
        if stream.first_token_s is not None and stream.num_generated > 1:
            per_token = (now - stream.first_token_s) / (stream.num_generated - 1)
        self.metrics.finished(stream.reason, num_prompt, stream.num_generated, now - stream.arrival_s, per_token)


def _pack(features: Mapping[str, Any]) -> PackedFeatures:
    from izh.engine.build import pack_features  # loads torch, as whoever made the features has

    return pack_features(features)


_detached: set[asyncio.Task[None]] = set()


def _detach(work: Any) -> None:
    """Run a coroutine on its own; the set keeps the task from being collected before it is done."""
    task = asyncio.ensure_future(work)
    _detached.add(task)
    task.add_done_callback(_detached.discard)
