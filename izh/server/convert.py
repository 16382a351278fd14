"""From bodies to what the engine takes.

Owns: the one place where a field of a body becomes a field of SamplingParams, prompts become token ids, and the
model's name is checked.
Must not know: answers, streams.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from izh.engine.async_llm import AsyncLLM
from izh.errors import NotFoundError, RequestError
from izh.request import MAX_LOGPROBS, SamplingParams
from izh.server.errors import shown
from izh.server.schema import ChatBody, CompletionBody, Conversation, Message, SamplingBody

if TYPE_CHECKING:
    from izh.server.images import Images

MAX_CHOICES = 1024
"""Most choices of one request: prompts times n."""

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
)


def check_model(engine: AsyncLLM, name: str | None) -> None:
    """Raises NotFoundError unless `name` (None: the base model) is the base model or an adapter served here."""
    served = (engine.info.name, *engine.info.adapters)
    if name is not None and name not in served:
        raise NotFoundError(f"model {shown(name)} is not served here; served: {', '.join(map(repr, served))}", "model")


def chosen_adapters(engine: AsyncLLM, body: SamplingBody) -> tuple[tuple[str, float], ...]:
    """The adapters that a request names, by `lora` or by `model`, each with its scale; () is the base model.

    Raises NotFoundError for a model or adapter not served here, RequestError when both fields name one.
    """
    check_model(engine, body.model)
    by_model = body.model if body.model in engine.info.adapters else None
    if body.lora is None:
        if by_model is None and body.lora_scale is not None:
            raise RequestError("lora_scale is only allowed when lora or model names an adapter", "lora_scale")
        return ((by_model, _scale(body.lora_scale)),) if by_model is not None else ()
    if by_model is not None and body.lora != by_model:
        raise RequestError(f"model names the adapter {by_model!r} and lora another; give one of them", "lora")
    if isinstance(body.lora, str):
        return ((body.lora, _scale(body.lora_scale)),)
    if body.lora_scale is not None:
        raise RequestError("lora_scale goes with one adapter; give each of the list its own scale", "lora_scale")
    return tuple((use.name, use.scale) for use in body.lora)


def _scale(scale: float | None) -> float:
    return 1.0 if scale is None else scale


def chat_params(body: ChatBody) -> SamplingParams:
    """Without a limit of its own, a chat answer may fill the context."""
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise RequestError(
            f"max_tokens ({body.max_tokens}) and max_completion_tokens ({body.max_completion_tokens}) name the same "
            "limit; give one of them",
            "max_completion_tokens",
        )
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise RequestError("top_logprobs is only allowed when logprobs is true", "top_logprobs")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {body.top_logprobs}", "top_logprobs"
            )
    return _params(
        body,
        max_tokens=limits.pop() if limits else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def completion_params(body: CompletionBody) -> SamplingParams:
    """With echo and logprobs the prompt's are asked for too. max_tokens 0 scores the prompt: one token is computed and
    left out of the answer (`completions.py`)."""
    num_choices = len(body.prompt) * body.n
    if num_choices > MAX_CHOICES:
        raise RequestError(
            f"one request may have at most {MAX_CHOICES} choices, got {len(body.prompt)} prompts times n {body.n}",
            "prompt",
        )
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return _params(
        body,
        max_tokens=1 if body.max_tokens == 0 and body.echo else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )


class Prompt(NamedTuple):
    """A conversation as the engine takes it. `features` are those of its images, if it has any."""

    token_ids: list[int]
    features: Mapping[str, Any] | None = None


async def chat_prompt(engine: AsyncLLM, images: "Images | None", body: Conversation) -> Prompt:
    """The conversation through the chat template, off the event loop. Unless told otherwise, the template opens the
    assistant's turn, or leaves the final message open to be continued.

    Raises RequestError naming an image part when `images` is None: nothing here reads images.
    """
    messages = [_template_message(message) for message in body.messages or ()]
    opens_turn = body.add_generation_prompt
    template: dict[str, Any] = {
        "add_generation_prompt": not body.continue_final_message if opens_turn is None else opens_turn,
        "continue_final_message": body.continue_final_message,
        "template_kwargs": body.chat_template_kwargs,
    }
    if images is not None:
        return Prompt(*await images.prompt(messages, engine.info.max_model_len, **template))
    if (param := next(_image_params(body), None)) is not None:
        raise RequestError(f"{param}: this server takes text parts only, it has nothing that reads images", param)
    return Prompt(await asyncio.to_thread(engine.tokenizer.chat, messages, **template))


def _image_params(body: Conversation) -> Iterator[str]:
    for i, message in enumerate(body.messages or ()):
        for j, part in enumerate(message.content or ()):
            if part.image_url is not None:
                yield f"messages[{i}].content[{j}].image_url"


async def prompt_ids(engine: AsyncLLM, prompts: Sequence[str | list[int]], add_special_tokens: bool) -> list[list[int]]:
    """The prompts' token ids; texts are tokenized off the event loop."""

    def encode() -> list[list[int]]:
        return [
            prompt if isinstance(prompt, list) else engine.tokenizer.encode(prompt, add_special_tokens)
            for prompt in prompts
        ]

    return await asyncio.to_thread(encode)


def _template_message(message: Message) -> dict[str, Any]:
    """Templates know no developer: it is the API's newer name of the system's role."""
    fields = message.model_dump(exclude_none=True)
    return fields | {"role": "system" if message.role == "developer" else message.role}


def _params(body: SamplingBody, **fields: Any) -> SamplingParams:
    same = {name: getattr(body, name) for name in _SAME_NAME}
    return SamplingParams(**same, logit_bias=_logit_bias(body.logit_bias), **fields)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    for token in bias or ():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise RequestError(f"logit_bias must map token ids to numbers, got the key {shown(token)}", "logit_bias")
    return {int(token): value for token, value in bias.items()} if bias else None
