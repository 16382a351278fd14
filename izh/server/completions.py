"""POST /v1/completions.

Owns: the shape of text completions, whole and streamed, for one prompt or several.
Must not know: sampling, scheduling.
Choices are numbered prompt by prompt: choice c of prompt p is p * n + c.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from izh.engine.async_llm import AsyncLLM
from izh.outputs import CompletionOutput, RequestOutput
from izh.server.answers import Usage, finish_reason, heading
from izh.server.convert import chosen_adapters, completion_params, prompt_ids
from izh.server.logprobs import TokenLists, prompt_logprobs
from izh.server.schema import CompletionBody
from izh.server.sse import merge, stream, while_connected

Pieces = AsyncGenerator[tuple[int, RequestOutput], None]
"""(prompt's index, what is new of its choices), as the engine gives them."""


def routes(engine: AsyncLLM) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        adapters = chosen_adapters(engine, body)
        params = completion_params(body)
        prompts = await prompt_ids(engine, body.prompt, body.add_special_tokens)
        pieces = merge(
            [
                engine.generate(prompt, params, priority=body.priority, cache_salt=body.cache_salt, adapters=adapters)
                for prompt in prompts
            ]
        )
        answer = _Answer(engine, body, prompts)
        if body.stream:
            return await stream(request, answer.events(pieces))
        return JSONResponse(await while_connected(request.receive, answer.whole(pieces)))

    return router


@dataclass(slots=True)
class _Choice:
    """What is new of a choice, or all of it."""

    index: int
    text: str = ""
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None

    def add(self, new: "_Choice") -> None:
        self.text += new.text
        if self.logprobs is not None and new.logprobs is not None:
            for name, values in new.logprobs.items():
                self.logprobs[name] += values
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason

    @property
    def body(self) -> dict[str, Any]:
        body = {
            "index": self.index,
            "text": self.text,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
        return body if self.prompt_logprobs is None else body | {"prompt_logprobs": self.prompt_logprobs}


@dataclass(slots=True)
class _Answer:
    """One request's answer: turns the engine's pieces into what is new of each choice, in order."""

    engine: AsyncLLM
    body: CompletionBody
    prompts: Sequence[list[int]]
    usage: Usage = field(default_factory=Usage)
    lists: dict[int, TokenLists] = field(default_factory=dict)  # by choice; an entry means that it has begun

    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        choices: dict[int, _Choice] = {}
        async with aclosing(self._changes(pieces)) as changes:
            async for new in changes:
                if new.index in choices:
                    choices[new.index].add(new)
                else:
                    choices[new.index] = new
        head = heading("cmpl", "text_completion", self.body.model or self.engine.info.name)
        return head | {"choices": [choices[i].body for i in sorted(choices)], "usage": self.usage.body}

    async def events(self, pieces: Pieces) -> AsyncGenerator[Any, None]:
        head = heading("cmpl", "text_completion", self.body.model or self.engine.info.name)
        if self.body.include_usage:
            head["usage"] = None
        async with aclosing(self._changes(pieces)) as changes:
            async for choice in changes:
                if choice.text or (choice.logprobs and choice.logprobs["tokens"]) or choice.finish_reason:
                    yield head | {"choices": [choice.body]}
        if self.body.include_usage:
            yield head | {"choices": [], "usage": self.usage.body}

    async def _changes(self, pieces: Pieces) -> AsyncGenerator[_Choice, None]:
        """What is new of each choice; the prompt, if echoed, is part of each choice's first."""
        for prompt in self.prompts:
            self.usage.add_prompt(len(prompt))
        scored: dict[int, RequestOutput] = {}  # by prompt, the piece with the prompt's log-probabilities
        async with aclosing(pieces):
            async for place, piece in pieces:
                if self._scores_only:
                    _drop_answer(piece)
                self.usage.add(piece)
                first = scored.setdefault(place, piece)
                for output in piece.outputs:
                    choice = _Choice(place * self.body.n + output.index)
                    if choice.index not in self.lists:
                        self._begin(choice, place, first)
                    self._advance(choice, output)
                    yield choice

    def _begin(self, choice: _Choice, place: int, first: RequestOutput) -> None:
        """What comes before a choice's first token."""
        tokenizer, body = self.engine.tokenizer, self.body
        lists = self.lists[choice.index] = TokenLists(tokenizer, body.logprobs or 0)
        if body.prompt_logprobs is not None and first.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(tokenizer, first.prompt_logprobs, body.prompt_logprobs)
        if body.echo:
            given = body.prompt[place]
            choice.text = given if isinstance(given, str) else tokenizer.decode(given, skip_special_tokens=False)
            if body.logprobs is not None and first.prompt_logprobs is not None:
                choice.logprobs = lists.prompt(choice.text, self.prompts[place], first.prompt_logprobs)

    def _advance(self, choice: _Choice, output: CompletionOutput) -> None:
        """What the engine adds to a choice."""
        choice.text += output.text
        choice.finish_reason, choice.stop_reason = finish_reason(output), output.stop_reason
        if self.body.logprobs is None:
            return
        hidden = self.engine.tokenizer.special_ids if self.body.skip_special_tokens else frozenset()
        new = self.lists[choice.index].answer(output.logprobs or [], hidden)
        if choice.logprobs is None:
            choice.logprobs = new
        else:
            choice.logprobs = {name: values + new[name] for name, values in choice.logprobs.items()}

    @property
    def _scores_only(self) -> bool:
        """True when nothing but the echoed prompt is wanted."""
        return self.body.echo and self.body.max_tokens == 0


def _drop_answer(piece: RequestOutput) -> None:
    """Leave the one token out that was computed only to score the prompt."""
    for output in piece.outputs:
        output.text, output.token_ids, output.logprobs, output.stop_reason = "", [], None, None
        output.finish_reason = "length" if output.finish_reason in ("stop", "length") else output.finish_reason
