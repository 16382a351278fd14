"""POST /v1/completions.

Owns: the shape of text completions, whole and streamed, for one prompt or several.
Must not know: sampling, scheduling.
Choices are numbered prompt by prompt: choice c of prompt p is p * n + c.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from izh.engine.async_llm import AsyncLLM
from izh.outputs import CompletionOutput, RequestOutput
from izh.request import TokenLogprobs
from izh.server.answers import Usage, heading, prompt_logprobs
from izh.server.convert import check_model, completion_params, text_ids
from izh.server.schema import CompletionBody
from izh.server.sse import merge, stream, while_connected
from izh.text.tokenizer import Tokenizer


def routes(engine: AsyncLLM) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        check_model(engine, body.model)
        params = completion_params(body)
        prompts = [
            prompt if isinstance(prompt, list) else await text_ids(engine, prompt, body.add_special_tokens)
            for prompt in body.prompt
        ]
        pieces = merge(
            [
                engine.generate(prompt, params, priority=body.priority or 0, cache_salt=body.cache_salt)
                for prompt in prompts
            ]
        )
        answer = _Answer(engine, body, prompts, params.n)
        if body.stream:
            return await stream(request, answer.events(pieces))
        return JSONResponse(await while_connected(request.receive, answer.whole(pieces)))

    return router


@dataclass(slots=True)
class _Choice:
    """A choice as far as it has come."""

    index: int
    echo: str = ""  # the prompt's text, still to be sent
    offset: int = 0  # characters of this choice's text before the next token
    text: str = ""
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None

    @property
    def body(self) -> dict[str, Any]:
        body = {
            "index": self.index,
            "text": self.text,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
        if self.prompt_logprobs is not None:
            body["prompt_logprobs"] = self.prompt_logprobs
        return body


@dataclass(slots=True)
class _Answer:
    """One request's answer: turns the engine's pieces into changes of choices, in order."""

    engine: AsyncLLM
    body: CompletionBody
    prompts: Sequence[list[int]]
    num_choices: int  # per prompt
    usage: Usage = field(default_factory=Usage)

    async def whole(self, pieces: AsyncGenerator[tuple[int, RequestOutput], None]) -> dict[str, Any]:
        choices: dict[int, _Choice] = {}
        async for new in self._changes(pieces):
            old = choices.setdefault(new.index, new)
            if old is new:
                continue
            old.text += new.text
            if old.logprobs is not None and new.logprobs is not None:
                for name, values in new.logprobs.items():
                    old.logprobs[name] += values
            old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
        head = heading("cmpl", "text_completion", self.engine.info.name)
        return head | {"choices": [choices[i].body for i in sorted(choices)], "usage": self.usage.body}

    async def events(self, pieces: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[Any, None]:
        head = heading("cmpl", "text_completion", self.engine.info.name)
        include_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        if include_usage:
            head["usage"] = None
        async for choice in self._changes(pieces):
            if choice.text or choice.logprobs or choice.finish_reason:
                yield head | {"choices": [choice.body]}
        if include_usage:
            yield head | {"choices": [], "usage": self.usage.body}

    async def _changes(self, pieces: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[_Choice, None]:
        """What is new of each choice, step by step; the prompt, if echoed, is part of each choice's first."""
        for prompt in self.prompts:
            self.usage.add_prompt(len(prompt))
        offsets: dict[int, int] = {}
        echoed: dict[int, list[TokenLogprobs | None]] = {}
        try:
            async for place, piece in pieces:
                if piece.prompt_logprobs is not None:
                    echoed[place] = piece.prompt_logprobs
                if self._scores_only:
                    self.usage.num_cached += piece.num_cached_tokens
                else:
                    self.usage.add(piece)
                for output in piece.outputs:
                    index = place * self.num_choices + output.index
                    choice = self._change(place, output, index, offsets.get(index), echoed.get(place))
                    offsets[index] = choice.offset
                    yield choice
        finally:
            await pieces.aclose()

    def _change(
        self,
        place: int,
        output: CompletionOutput,
        index: int,
        offset: int | None,
        prompt_entries: list[TokenLogprobs | None] | None,
    ) -> _Choice:
        tokenizer = self.engine.tokenizer
        entries: list[tuple[int, TokenLogprobs | None]] = []
        choice = _Choice(index, offset=offset or 0)
        if offset is None and self.body.echo:
            prompt = self.prompts[place]
            choice.text = tokenizer.decode(prompt, skip_special_tokens=self.body.skip_special_tokens is not False)
            if self.body.logprobs is not None and prompt_entries is not None:
                entries += zip(prompt, prompt_entries, strict=True)
        elif offset is None and prompt_entries is not None and self.body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(tokenizer, prompt_entries)
        if self._scores_only:
            choice.finish_reason = "length"
        else:
            choice.text += output.text
            choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
            entries += [(entry.token_id, entry) for entry in output.logprobs or []]
        if self.body.logprobs is not None:
            choice.logprobs, choice.offset = _logprobs(tokenizer, entries, choice.offset)
        return choice

    @property
    def _scores_only(self) -> bool:
        """True when nothing but the echoed prompt is wanted."""
        return self.body.echo and self.body.max_tokens == 0


def _logprobs(
    tokenizer: Tokenizer, entries: Sequence[tuple[int, TokenLogprobs | None]], offset: int
) -> tuple[dict[str, list[Any]], int]:
    """The API's parallel lists, and the offset after the last token."""
    body: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, entry in entries:
        text = tokenizer.piece(token_id)[0]
        body["tokens"].append(text)
        body["text_offset"].append(offset)
        body["token_logprobs"].append(entry and entry.logprob)
        body["top_logprobs"].append(entry and {tokenizer.piece(token)[0]: value for token, value in entry.top})
        offset += len(text)
    return body, offset
