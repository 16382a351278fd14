"""From bodies to what the engine takes.

Owns: the one place where a field of a body becomes a field of SamplingParams; the check of the model's name.
Must not know: answers, streams.
"""

import asyncio
from typing import Any

from izh.engine.async_llm import AsyncLLM
from izh.errors import NotFoundError, RequestError
from izh.request import MAX_LOGPROBS, SamplingParams
from izh.server.schema import ChatBody, CompletionBody, SamplingBody, TokenizeBody

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
)


def check_model(engine: AsyncLLM, name: str | None) -> None:
    """Raises NotFoundError unless `name` (None: whatever is served) is served here."""
    if name is not None and name != engine.info.name:
        raise NotFoundError(f"model {name!r} is not served here; served: {engine.info.name!r}", "model")


def chat_params(body: ChatBody) -> SamplingParams:
    """Without a limit of its own, a chat answer may fill the context."""
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise RequestError("top_logprobs is only allowed when logprobs is true", "top_logprobs")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {body.top_logprobs}", "top_logprobs"
            )
    return _params(body, max_tokens=limit, logprobs=(body.top_logprobs or 0) if body.logprobs else None)


def completion_params(body: CompletionBody) -> SamplingParams:
    """With echo and logprobs the prompt's are asked for too. max_tokens 0 scores the prompt: one token is computed and
    left out of the answer (`completions.py`)."""
    fields: dict[str, Any] = {"logprobs": body.logprobs}
    if body.max_tokens is not None:
        fields["max_tokens"] = 1 if body.max_tokens == 0 and body.echo else body.max_tokens
    if body.echo and body.logprobs is not None:
        fields["prompt_logprobs"] = body.logprobs
    return _params(body, **fields)


async def chat_ids(engine: AsyncLLM, body: ChatBody | TokenizeBody) -> list[int]:
    """The conversation's token ids, through the chat template, off the event loop."""
    return await asyncio.to_thread(
        engine.tokenizer.chat,
        body.messages or [],
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
    )


async def text_ids(engine: AsyncLLM, text: str, add_special_tokens: bool) -> list[int]:
    """The text's token ids, off the event loop."""
    return await asyncio.to_thread(engine.tokenizer.encode, text, add_special_tokens=add_special_tokens)


def _params(body: SamplingBody, **fields: Any) -> SamplingParams:
    given = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    return SamplingParams(**(given | {"logit_bias": _logit_bias(body.logit_bias)} | fields))


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        wrong = next(token for token in bias if not token.lstrip("-").isdecimal())
        raise RequestError(f"logit_bias must map token ids to numbers, got the key {wrong!r}", "logit_bias") from None
