"""The offline face: a list of prompts in, a list of answers out, the engine in this very process.

Owns: LLM. Must not know: HTTP, processes.
"""

import time
import uuid
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from izh.config import EngineOptions
from izh.engine.build import build, pack_features
from izh.engine.control import Control
from izh.engine.messages import LoadAdapter, UnloadAdapter
from izh.errors import IzhError, error_of
from izh.model.source import resolve
from izh.outputs import RequestOutput
from izh.request import PackedFeatures, SamplingParams, choices_of
from izh.text.output import OutputProcessor
from izh.text.tokenizer import Tokenizer

Prompt = str | list[int]
Messages = list[dict[str, Any]]
Features = Mapping[str, Any]
# A prompt, its token ids, how, which adapter, and what else goes along with the prompt.
_Asked = tuple[Prompt, list[int], SamplingParams, str | None, PackedFeatures | None]


class LLM:
    """A model for batch work. Options are EngineOptions' fields, as keywords.

    >>> llm = LLM("demo")
    >>> llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    def __init__(self, model: str = "demo", *, quiet: bool = False, **options: Any) -> None:
        self.options = EngineOptions(model=model, **options)
        source = resolve(self.options.model, self.options.revision)
        self.tokenizer = Tokenizer.load(source.path)
        self._quiet = quiet
        engine = build(self.options, source, quiet=quiet)
        self._core = engine.core
        self._control = Control(engine.adapters)
        self._processor = OutputProcessor(self.tokenizer)
        self._inboxes: dict[str, deque[RequestOutput | IzhError]] = {}  # of every live request: its call's own

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self._core.max_model_len

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
        features: Features | Sequence[Features | None] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt (text or token ids), in order. `params` and `lora` (an adapter's name, None for the base
        model) are one for all, or one each. `features` are those of a prompt with images (`VisionPrompt.features`),
        whose token ids are then the prompt; one for each prompt.

        Raises RequestError for the first prompt that cannot be answered; nothing is left running then.
        """
        texts = _as_list(prompts)
        all_params = params if isinstance(params, list) else [params or SamplingParams()] * len(texts)
        if len(all_params) != len(texts):
            raise ValueError(f"{len(texts)} prompts but {len(all_params)} params: give one, or one for each")
        show = (not self._quiet) if progress is None else progress
        done: dict[str, RequestOutput] = {}
        adapters = [lora] * len(texts) if lora is None or isinstance(lora, str) else list(lora)
        if len(adapters) != len(texts):
            raise ValueError(f"{len(texts)} prompts but {len(adapters)} lora: give one, or one for each")
        all_features = [features] if isinstance(features, Mapping) else list(features or [None] * len(texts))
        if len(all_features) != len(texts):
            raise ValueError(f"{len(texts)} prompts but {len(all_features)} features: give one for each")
        # All of them before any runs: one may be refused.
        token_ids = [self._encode(text) for text in texts]
        packed = [None if each is None else pack_features(each) for each in all_features]
        asked = {_new_id(): each for each in zip(texts, token_ids, all_params, adapters, packed, strict=True)}
        bar = Progress(
            TextColumn("Generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
            console=Console(stderr=True),
            disable=not show,
        )
        start, num_tokens = time.monotonic(), 0
        with bar:
            task = bar.add_task("", total=len(asked), rate="")
            for piece in self._run(asked):
                if piece.request_id in done:
                    done[piece.request_id].add(piece)
                else:
                    done[piece.request_id] = piece
                num_tokens += sum(len(output.token_ids) for output in piece.outputs)
                rate = f"{num_tokens / (time.monotonic() - start):.0f} tokens/s"
                bar.update(task, advance=1 if piece.finished else 0, rate=rate)
        return [done[request_id] for request_id in asked]

    def chat(
        self,
        messages: Messages | list[Messages],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
        progress: bool | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template. `params` and `lora` as in
        `generate`; `template` goes to `Tokenizer.chat` (add_generation_prompt, continue_final_message, tools,
        template_kwargs)."""
        several = [messages] if _is_conversation(messages) else messages
        prompts = [self.tokenizer.chat(cast(Messages, each), **template) for each in several]
        return self.generate(prompts, params, lora=lora, progress=progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """Answer one prompt, yielding what is new after each step. Closing the iterator aborts the request. Several
        streams may be read in turns."""
        yield from self._run({_new_id(): (prompt, self._encode(prompt), params or SamplingParams(), None, None)})

    def load_lora(self, name: str, directory: str | Path, *, replace: bool = False) -> None:
        """Let prompts name the adapter of this directory from now on. Raises AdapterError, with nothing changed."""
        where = str(Path(directory).expanduser().absolute())
        self._command(LoadAdapter(call_id=0, name=name, directory=where, replace=replace))

    def unload_lora(self, name: str) -> None:
        """Forget an adapter. Raises NotFoundError for an unknown name, AdapterInUseError while requests use it."""
        self._command(UnloadAdapter(call_id=0, name=name))

    def _command(self, command: LoadAdapter | UnloadAdapter) -> None:
        self._control.add(command)
        (reply,) = self._control.wait()
        if reply.error is not None:
            raise error_of(reply.kind, reply.error)

    def reset_prefix_cache(self) -> None:
        """Make later requests reuse nothing computed so far."""
        self._core.reset_prefix_cache()

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _add(
        self,
        request_id: str,
        prompt: Prompt,
        token_ids: list[int],
        params: SamplingParams,
        lora: str | None,
        features: PackedFeatures | None,
    ) -> None:
        self._processor.add(request_id, token_ids, params, prompt if isinstance(prompt, str) else None)
        adapters = () if lora is None else ((lora, 1.0),)
        arrival_s = time.monotonic()
        for request in choices_of(request_id, token_ids, params, arrival_s, adapters=adapters, features=features):
            self._core.add(request)

    def _run(self, asked: dict[str, _Asked]) -> Iterator[RequestOutput]:
        """Add what is asked, by request id, and step until all of it is finished; abort what is left of it when stopped
        early. Other calls' requests move on meanwhile, and what comes of them waits in their inboxes."""
        inbox: deque[RequestOutput | IzhError] = deque()
        live: set[str] = set()
        try:
            for request_id, each in asked.items():
                self._inboxes[request_id] = inbox
                live.add(request_id)
                self._add(request_id, *each)
            while live:
                while not inbox:
                    self._step()
                item = inbox.popleft()
                if isinstance(item, IzhError):
                    raise item
                if item.finished:
                    live.discard(item.request_id)
                    del self._inboxes[item.request_id]
                yield item
        finally:
            for request_id in live:
                del self._inboxes[request_id]
                for engine_id in self._processor.abort(request_id):
                    self._core.abort(engine_id)

    def _step(self) -> None:
        """One step of the engine, whose outputs go to the calls that asked for them."""
        processed = self._processor.process(self._core.step())
        for engine_id in processed.abort:
            self._core.abort(engine_id)
        for request_id, finish in processed.failed:
            self._inboxes[request_id].append(error_of(finish.kind, finish.error or "unknown error", finish.param))
        for piece in processed.ready:
            self._inboxes[piece.request_id].append(piece)


def _new_id() -> str:
    return f"offline-{uuid.uuid4().hex}"


def _is_conversation(messages: Messages | list[Messages]) -> bool:
    return bool(messages) and isinstance(messages[0], dict)


def _as_list(prompts: Prompt | list[str] | list[list[int]]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(list[int], prompts) if isinstance(prompts, list) else prompts]
    return [*cast(list[Prompt], prompts)]
