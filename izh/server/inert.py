"""Fields of the OpenAI API that are not implemented, and the values at which that makes no difference.

Owns: those tables, one per body. `schema.py` refuses by name every field that is neither here nor implemented.
Must not know: what the implemented fields are, or do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from izh.errors import RequestError
from izh.server.errors import shown


@dataclass(frozen=True)
class Inert:
    """A field that asks for nothing when it is null or one of `values`; `why` it is refused at any other."""

    why: str
    values: tuple[Any, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Raises RequestError for a value that asks for something."""
        # `in` would take 0 for False and 1 for True.
        if not any(type(value) is type(harmless) and value == harmless for harmless in (None, *self.values)):
            raise RequestError(f"{name} is not implemented: {self.why}; leave it out, got {shown(value)}", name)


@dataclass(frozen=True)
class Hint:
    """A string about the caller (for abuse control, cache routing) that changes no answer, as the API documents it."""

    def check(self, name: str, value: Any) -> None:
        """Raises RequestError for what is no string."""
        if not isinstance(value, str | None):
            raise RequestError(f"{name} must be a string, got {shown(value)}", name)


Table = Mapping[str, Inert | Hint]

_NO_TOOL_CALLS = "this server does not make tool calls"
_TEXT_ONLY = "this server answers in plain text"
_NOT_STORED = "nothing is stored"
_BEST_OF = Inert("ask for n choices instead", (1,))

COMPLETION: Table = {
    "user": Hint(),
    "best_of": _BEST_OF,
    "suffix": Inert("the model continues a text and does not fill gaps", ("",)),
}

CHAT: Table = {
    "user": Hint(),
    "safety_identifier": Hint(),
    "prompt_cache_key": Hint(),
    "prompt_cache_retention": Inert("the prefix cache keeps what fits", ("in_memory", "in-memory")),
    "prompt_cache_options": Inert("the prefix cache has no options per request"),
    "tools": Inert(_NO_TOOL_CALLS, ([],)),
    "tool_choice": Inert(_NO_TOOL_CALLS, ("none", "auto")),
    "parallel_tool_calls": Inert(_NO_TOOL_CALLS, (True, False)),
    "functions": Inert(_NO_TOOL_CALLS, ([],)),
    "function_call": Inert(_NO_TOOL_CALLS, ("none", "auto")),
    "response_format": Inert(_TEXT_ONLY, ({"type": "text"},)),
    "modalities": Inert(_TEXT_ONLY, (["text"],)),
    "audio": Inert(_TEXT_ONLY),
    "verbosity": Inert("say in the messages how long the answer should be", ("medium",)),
    "reasoning_effort": Inert("if the chat template has a switch for it, set that in chat_template_kwargs"),
    "prediction": Inert("answers are not predicted"),
    "web_search_options": Inert("this server does not search the web"),
    "moderation": Inert("this server does not moderate"),
    "service_tier": Inert("there is one tier", ("auto", "default")),
    "store": Inert(_NOT_STORED, (False,)),
    "metadata": Inert(_NOT_STORED, ({},)),
    "best_of": _BEST_OF,
    "echo": Inert("only /v1/completions can echo", (False,)),
    "add_special_tokens": Inert("the chat template writes the special tokens", (False,)),
}

# What a client sends along when it hands an answer back as part of the next conversation.
MESSAGE: Table = {
    "refusal": Inert(_TEXT_ONLY),
    "annotations": Inert(_TEXT_ONLY, ([],)),
    "audio": Inert(_TEXT_ONLY),
    "function_call": Inert(_NO_TOOL_CALLS),
}

IMAGE_URL: Table = {"detail": Inert("an image is read in the one way that the model has", ("auto",))}

STREAM: Table = {"include_obfuscation": Inert("events are not padded", (False,))}

UNLOAD_ADAPTER: Table = {"lora_int_id": Inert("an adapter is known by its name")}

EMBEDDING: Table = {"user": Hint()}
RERANK: Table = {
    "user": Hint(),
    "rank_fields": Inert("documents are texts", (["text"],)),
    "max_chunks_per_doc": Inert("a document is not split; it is cut with max_tokens_per_doc", (1,)),
}
SCORE: Table = {"user": Hint()}
