"""The bodies that clients send.

Owns: one pydantic model per route; which fields exist, their types, and what is refused by name.
Must not know: the engine, what a field does (`convert.py`).
Invariant: nothing is dropped in silence. A field that is not here, or is here but only at the value at which it has no
effect, is an error that names it.
"""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from izh.errors import RequestError


class Body(BaseModel):
    """A JSON object with known fields. `INERT` lists the API's fields that are accepted only at harmless values."""

    model_config = ConfigDict(strict=True, extra="ignore", arbitrary_types_allowed=True)
    INERT: ClassVar[dict[str, tuple[Any, ...]]] = {}
    IGNORED: ClassVar[frozenset[str]] = frozenset({"user", "safety_identifier", "prompt_cache_key"})
    """Fields that only describe the caller: any value, no effect, as the API documents them."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_implemented(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, value in body.items():
            if name in cls.model_fields or name in cls.IGNORED:
                continue
            if name not in cls.INERT:
                raise RequestError(f"{name} is not a field of this request that izh implements; leave it out", name)
            # `in` would take 0 for False and 1 for True.
            if not any(type(value) is type(ok) and value == ok for ok in (None, *cls.INERT[name])):
                raise RequestError(f"{name} is not implemented; leave it out", name)
        return body


class StreamOptions(Body):
    include_usage: bool = False
    INERT = {"include_obfuscation": (False,)}


class SamplingBody(Body):
    """What chat and text completions share. None means the default of `SamplingParams`."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @field_validator("stop")
    @classmethod
    def _stop_is_text(cls, value: Any) -> Any:
        several = [value] if isinstance(value, str) else value
        if several is not None and not (isinstance(several, list) and all(isinstance(s, str) for s in several)):
            raise RequestError(f"stop must be a string or a list of strings, got {value!r}")
        return several

    @field_validator("cache_salt")
    @classmethod
    def _salt_is_not_empty(cls, value: str | None) -> str | None:
        if value == "":
            raise RequestError("cache_salt must not be empty; leave it out to share the prefix cache")
        return value

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "SamplingBody":
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true", "stream_options")
        return self


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    INERT = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "best_of": (),
    }

    @field_validator("messages")
    @classmethod
    def _messages_have_roles(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for index, message in enumerate(messages):
            place = f"messages[{index}]"
            if not isinstance(message.get("role"), str):
                raise RequestError(f"{place}.role must be a string, got {message.get('role')!r}")
            content = message.get("content")
            if content is not None and not isinstance(content, str | list):
                raise RequestError(f"{place}.content must be a string or a list of parts, got {content!r}")
            calls = message.get("tool_calls")
            if calls is not None and not (isinstance(calls, list) and all(isinstance(c, dict) for c in calls)):
                raise RequestError(f"{place}.tool_calls must be a list of objects, got {calls!r}")
        return messages


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Any = Field(description="text, a list of texts, token ids, or a list of those")
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True
    INERT = {"suffix": (), "best_of": ()}

    @field_validator("prompt")
    @classmethod
    def _prompt_is_one_or_several(cls, value: Any) -> list[str | list[int]]:
        if isinstance(value, str) or (isinstance(value, list) and value and all(map(_is_id, value))):
            return [value]
        if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
            return value
        if isinstance(value, list) and value and all(isinstance(e, list) and all(map(_is_id, e)) for e in value):
            return value
        if value == []:
            raise RequestError("prompt must not be an empty list")
        raise RequestError("prompt must be a string, a list of strings, a list of token ids, or a list of those")


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_prompt_and_messages(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give exactly one of prompt and messages", "prompt")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
