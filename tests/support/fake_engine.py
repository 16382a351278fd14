"""An engine whose every step a test decides, for what the server does around one: limits, errors, disconnects, framing.

It has the real tokenizer, metrics and types; only where the tokens come from is a script.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import tiny_checkpoint

from izh.engine.async_llm import State
from izh.engine.build import load_encoders
from izh.engine.info import ModelInfo
from izh.engine.messages import Encode, EncoderTask
from izh.engine.metrics import Metrics
from izh.errors import error_of
from izh.outputs import CompletionOutput, RequestOutput
from izh.request import Entry, SamplingParams
from izh.text.tokenizer import Tokenizer

Script = Callable[[list[int], SamplingParams], AsyncIterator[CompletionOutput]]


async def two_words(_prompt: list[int], _params: SamplingParams) -> AsyncIterator[CompletionOutput]:
    yield CompletionOutput(0, "hello", [5])
    yield CompletionOutput(0, " world", [6], finish_reason="stop")


class FakeEngine:
    """Has the face of AsyncLLM. `num_live` counts generators that have begun and not ended."""

    def __init__(self, script: Script = two_words) -> None:
        self.script = script
        self.tokenizer = Tokenizer(tiny_checkpoint.tokenizer())
        self.info = ModelInfo(
            name="fake", path="fake", max_model_len=256, vocab_size=self.tokenizer.vocab_size, adapters={}
        )
        self.metrics = Metrics("fake")
        self.state: State = "starting"
        self._lock = threading.Lock()
        self.num_begun = 0
        self.num_live = 0

    async def start(self, encoders: Mapping[EncoderTask, str] | None = None) -> None:
        self._encoders = load_encoders(encoders or {})
        self.state = "ready"

    async def encode(self, encoder: EncoderTask, entries: list[Entry]) -> list[bytes]:
        """In a thread of this process, a few at a time as in the engine's."""

        def work() -> list[bytes]:
            with self._lock:
                self._encoders.add(Encode(call_id=0, encoder=encoder, entries=entries))
                while not (replies := self._encoders.turn(64)):
                    pass
            if replies[0].error is not None:
                raise error_of(replies[0].kind, replies[0].error)
            return replies[0].results

        return await asyncio.to_thread(work)

    async def shutdown(self) -> None:
        self.state = "dead"

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
        assert isinstance(prompt, list)
        self.num_begun += 1
        self.num_live += 1
        try:
            async for output in self.script(prompt, params):
                yield RequestOutput(request_id or "fake", prompt, [output], finished=output.finish_reason is not None)
        finally:
            self.num_live -= 1
