"""The bodies that clients send.

Owns: one pydantic model per body: which fields exist, their types, and what is refused by name.
Must not know: the engine, or what a field does (`convert.py`).
Invariants: nothing is dropped in silence: a field that is neither here nor in `inert.py` is an error that names it.
No value is converted to another type. null means "not given", for every field. What passes here can be written as
UTF-8 and as 64-bit integers, so that it can travel to the engine.
"""

import difflib
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)

from izh.errors import RequestError
from izh.server import inert
from izh.server.errors import printable

_MAX_NAME = 80  # characters of an unknown field's name that a message repeats


class Body(BaseModel):
    """A JSON object of which every field counts; `INERT` has those that count only by asking for nothing."""

    model_config = ConfigDict(strict=True, extra="forbid")
    INERT: ClassVar[inert.Table] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_implemented(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        given = {}
        for name, value in body.items():
            if name in cls.model_fields:
                if value is not None:
                    given[name] = value
            elif name in cls.INERT:
                cls.INERT[name].check(name, value)
            else:
                spelled = printable(name[:_MAX_NAME])
                close = difflib.get_close_matches(spelled, cls.model_fields, n=1)
                advice = f"did you mean {close[0]}?" if close else "leave it out"
                raise RequestError(f"{spelled} is not a field that this server implements; {advice}", spelled)
        return given


def must_be(what: str) -> WrapValidator:
    """One message for a union, instead of one for each of its members; if a member says what is wrong, that one."""

    def check(value: Any, accept: Callable[[Any], Any]) -> Any:
        try:
            return accept(value)
        except ValidationError as error:
            of_a_member = next((each["ctx"]["error"] for each in error.errors() if each["type"] == "value_error"), None)
            raise of_a_member or ValueError(f"must be {what}") from error

    return WrapValidator(check)


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("must be valid Unicode: it holds half of a surrogate pair") from error
    return text


def _in_a_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(_unicode)]
Int = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Texts = Annotated[list[Text], BeforeValidator(_in_a_list), must_be("a string or a list of strings")]


class StreamOptions(Body):
    """What a stream tells besides the answer."""

    INERT = inert.STREAM

    include_usage: bool = False


class AdapterUse(Body):
    """One of several adapters on a request."""

    name: Text
    scale: float = Field(default=1.0, allow_inf_nan=False)


class SamplingBody(Body):
    """What chat and text completions share. `SamplingParams` knows the limits of the values."""

    model: Text | None = None
    n: Int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: Int = 0
    stop: Texts = []
    stop_token_ids: list[Int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Int = 0
    lora: Annotated[Text | list[AdapterUse], must_be("an adapter's name, or a list of name and scale")] | None = None
    lora_scale: float | None = Field(default=None, allow_inf_nan=False)
    cache_salt: Text | None = None

    @model_validator(mode="after")
    def _fields_that_depend(self) -> "SamplingBody":
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs is only available when stream is false", "prompt_logprobs")
        if self.cache_salt == "":
            raise RequestError("cache_salt must not be empty; leave it out to share the prefix cache", "cache_salt")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


def _as_prompts(value: Any) -> Any:
    """One prompt as a list of one; an empty list is no list of prompts and no prompt."""
    if isinstance(value, list) and not value:
        raise RequestError("prompt must not be an empty list")
    is_one = isinstance(value, str) or (isinstance(value, list) and isinstance(value[0], int))
    return [value] if is_one else value


class CompletionBody(SamplingBody):
    """POST /v1/completions. `prompt` may be one or several, each a text or token ids; here it is always a list."""

    INERT = inert.COMPLETION

    prompt: Annotated[
        list[Text] | list[list[Int]],
        must_be("a string, a list of strings, a list of token ids, or a list of those"),
        BeforeValidator(_as_prompts),
    ]
    max_tokens: Int = 16
    echo: bool = False
    logprobs: Int | None = None
    add_special_tokens: bool = True


class ImageUrl(Body):
    """Where an image is: a data URI, or a URL that the server may read."""

    INERT = inert.IMAGE_URL

    url: Text


class Part(Body):
    """A part of a message's content: a text or an image."""

    type: Literal["text", "image_url"]
    text: Text | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text_and_images(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in ("text", "image_url"):
            raise RequestError(
                f"content of type {kind[:_MAX_NAME]!r} is not supported: parts are of type text or image_url", "type"
            )
        return part

    @model_validator(mode="after")
    def _what_its_type_says(self) -> "Part":
        for name in ("text", "image_url"):
            if (getattr(self, name) is not None) != (self.type == name):
                raise RequestError(
                    f"{name} is required in a part of type {name}"
                    if self.type == name
                    else f"{name} does not belong in a part of type {self.type}",
                    name,
                )
        return self


def _as_parts(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of parts")
    return content


class ToolFunction(Body):
    """What an earlier answer called: `arguments` is JSON in a string, as models write it."""

    name: Text
    arguments: Text


class ToolCall(Body):
    """A call in an earlier answer, for the chat template."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: ToolFunction


class Message(Body):
    """A turn of a conversation."""

    INERT = inert.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Part], BeforeValidator(_as_parts)] | None = None
    name: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise RequestError(f"tool_calls belong to messages of the assistant, not of role {self.role}", "tool_calls")
        if not self.content and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("must have content, a string or a list of at least one part")
        return self


class Conversation(Body):
    """Messages, and how the chat template is to write them."""

    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(Conversation, SamplingBody):
    """POST /v1/chat/completions."""

    INERT = inert.CHAT

    messages: list[Message]
    max_tokens: Int | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Int | None = None


class TokenizeBody(Conversation):
    """POST /tokenize: a prompt, or messages through the chat template."""

    model: Text | None = None
    prompt: Text | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_prompt_and_messages(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give exactly one of prompt and messages", "prompt")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: Text | None = None
    tokens: list[int]


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: Text
    lora_path: Text
    load_inplace: bool = False


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter."""

    INERT = inert.UNLOAD_ADAPTER

    lora_name: Text
