"""The engine in the caller's own process.

Owns: OfflineEngine: its parts, the requests that live in it, and whose each of them is.
Must not know: how prompts are written, progress, HTTP.
Invariant: a call that ends early, by an error or by its caller, leaves no request behind.
"""

import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from izh.config import EngineOptions
from izh.engine.build import build
from izh.engine.control import Control
from izh.engine.messages import LoadAdapter, UnloadAdapter
from izh.errors import IzhError, error_of
from izh.model.source import resolve
from izh.outputs import PoolingOutput, RequestOutput
from izh.request import PackedFeatures, PoolingParams, SamplingParams, choices_of
from izh.text.output import OutputProcessor
from izh.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, and what is wanted of it. `prompt` is its text, if it was one; `lora` an adapter's name."""

    token_ids: list[int]
    params: SamplingParams | PoolingParams
    prompt: str | None = None
    lora: str | None = None
    features: PackedFeatures | None = None


class OfflineEngine:
    """Steps whenever somebody waits for an answer; what comes of other calls' requests meanwhile is kept for them."""

    def __init__(self, options: EngineOptions, *, quiet: bool) -> None:
        """Load the model. Raises ModelLoadError, AdapterError, OptionError."""
        source = resolve(options.model, options.revision)
        self.path = source.path
        self.name = options.served_model_name or source.name
        self.tokenizer = Tokenizer.load(source.path)
        engine = build(options, source, quiet=quiet)
        self.generates = engine.generates
        self.core = engine.core
        self._control = Control(engine.adapters)
        self._processor = OutputProcessor(self.tokenizer)
        # Of each live request, its call's.
        self._inboxes: dict[str, deque[RequestOutput | PoolingOutput | IzhError]] = {}

    def run(self, asked: Sequence[Asked]) -> Iterator[tuple[int, RequestOutput | PoolingOutput]]:
        """Yield what each step adds, with the index of what it answers, until all is finished. Raises RequestError for
        the first that cannot be answered, IzhError for a failed step."""
        inbox: deque[RequestOutput | PoolingOutput | IzhError] = deque()
        index_of: dict[str, int] = {}  # of what is live
        try:
            for index, each in enumerate(asked):
                request_id = f"offline-{uuid.uuid4().hex}"
                self._inboxes[request_id] = inbox
                index_of[request_id] = index
                self._add(request_id, each)
            while index_of:
                while not inbox:
                    self._step()
                item = inbox.popleft()
                if isinstance(item, IzhError):
                    raise item
                index = index_of[item.request_id]
                if isinstance(item, PoolingOutput) or item.finished:
                    del index_of[item.request_id], self._inboxes[item.request_id]
                yield index, item
        finally:
            for request_id in index_of:
                del self._inboxes[request_id]
                for engine_id in self._processor.abort(request_id):
                    self.core.abort(engine_id)

    def command(self, command: LoadAdapter | UnloadAdapter) -> None:
        """Carry it out. Raises the error that it ends with."""
        self._control.add(command)
        (reply,) = self._control.wait()
        if reply.error is not None:
            raise error_of(reply.kind, reply.error)

    def _add(self, request_id: str, asked: Asked) -> None:
        if isinstance(asked.params, SamplingParams):
            self._processor.add(request_id, asked.token_ids, asked.params, asked.prompt)
        else:
            self._processor.add_pooled(request_id, asked.token_ids)
        for request in choices_of(
            request_id,
            asked.token_ids,
            asked.params,
            time.monotonic(),
            adapters=() if asked.lora is None else ((asked.lora, 1.0),),
            features=asked.features,
        ):
            self.core.add(request)

    def _step(self) -> None:
        """One step of the engine, whose outputs go to the calls that asked for them."""
        processed = self._processor.process(self.core.step())
        for engine_id in processed.abort:
            self.core.abort(engine_id)
        for request_id, finish in processed.failed:
            self._inboxes[request_id].append(error_of(finish.kind, finish.error or "unknown error", finish.param))
        for piece in processed.ready:
            self._inboxes[piece.request_id].append(piece)
        for vector in processed.pooled:
            self._inboxes[vector.request_id].append(vector)
