"""Chat messages as the OpenAI API spells them, to the form that checkpoints' chat templates expect.

Owns: what is rewritten on the way: text parts, null fields, tool-call arguments. Everything else a message holds
(reasoning, names, tool-call ids) is handed to the template as it is.
Must not know: the tokenizer, HTTP.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from izh.errors import RequestError

IMAGE_TYPES = ("image", "image_url")
"""Types of parts that are an image."""


def template_messages(messages: Sequence[Mapping[str, Any]], image: str | None = None) -> list[dict[str, Any]]:
    """Copies of the messages in the templates' form. `image` is what stands for an image part; None: there may be none.

    A list of text parts becomes one string, joined by newlines (as vLLM and llama.cpp do: most templates read strings
    only). Fields that are None are left out: templates test for presence. Tool-call arguments, a JSON string in the
    API, become the object that templates print; text that is no JSON object, which a model may have written, stays.

    Raises: RequestError naming the message and part that is not text (nor an image, where there may be some).
    """
    if not messages:
        raise RequestError("messages must hold at least one message, got none", "messages")
    return [_template_message(f"messages[{i}]", message, image) for i, message in enumerate(messages)]


def _template_message(param: str, message: Mapping[str, Any], image: str | None) -> dict[str, Any]:
    out = {key: value for key, value in message.items() if value is not None}
    content = out.get("content", "")
    if not isinstance(content, str):
        out["content"] = "\n".join(_text(f"{param}.content[{i}]", part, image) for i, part in enumerate(content))
    if "tool_calls" in out:
        out["tool_calls"] = [_template_tool_call(call) for call in out["tool_calls"]]
    return out


def _text(param: str, part: Any, image: str | None) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if image is not None and isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES:
        return image
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise RequestError(f'{param} must be {{"type": "text", "text": "..."}}, got type {kind!r}', param)


def _template_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    out = {key: value for key, value in call.items() if value is not None}
    function = out.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        out["function"] = {**function, "arguments": _arguments(function["arguments"])}
    return out


def _arguments(text: str) -> Any:
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return text
    return arguments if isinstance(arguments, dict) else text
