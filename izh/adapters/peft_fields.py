"""Values of adapter_config.json, each read into its type or refused with its name.

Owns: one reader per kind of value; which fields are harmless.
Must not know: what the fields are used for.
Invariant: whatever is refused is named together with the value found.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args

from izh.errors import AdapterError

FILE = "adapter_config.json"
Bias = Literal["none", "lora_only", "all"]
T = TypeVar("T")

HARMLESS = frozenset(
    {
        "peft_type",
        "peft_version",
        "task_type",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "runtime_config",
        "megatron_core",
        "qalora_group_size",
        # How A and B were initialised, each read only when init_lora_weights names it.
        "eva_config",
        "corda_config",
        "lora_ga_config",
    }
)
_INITS = (True, False, None, "gaussian", "orthogonal", "eva")  # the others may change the base weights too
_EMPTY_IS_ABSENT = frozenset({"target_parameters", "layer_replication", "loftq_config"})


def refuse(name: str, value: Any, why: str) -> AdapterError:
    """The error for a field; to be raised."""
    return AdapterError(f"{FILE}: {name} = {value!r} {why}")


def refuse_unless_harmless(name: str, value: Any) -> None:
    """Raises AdapterError for a field that izh does not compute with, unless it changes nothing at this value."""
    if name in HARMLESS or value is None or value is False:
        return
    if name in _EMPTY_IS_ABSENT and value in ([], {}):
        return
    if name == "init_lora_weights":
        if (value.lower() if isinstance(value, str) else value) in _INITS:
            return
        raise refuse(
            name,
            value,
            "may change the base weights too; convert the adapter with PEFT's "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )
    raise refuse(name, value, "is not supported; it may change what is computed")


def whole(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refuse(name, value, "must be a whole number from 1 on")
    return value


def number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise refuse(name, value, "must be a number")
    return value


def flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise refuse(name, value, "must be true or false")
    return bool(value)


def bias(value: Any) -> Bias:
    if value is None:
        return "none"
    if value not in get_args(Bias):
        raise refuse("bias", value, f"must be one of {', '.join(map(repr, get_args(Bias)))}")
    return value


def names(name: str, value: Any) -> str | tuple[str, ...]:
    """A pattern as text, or a list of names."""
    if isinstance(value, str):
        return _regex(name, value)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise refuse(name, value, "must be text or a list of texts")
    return tuple(value)


def layers(value: Any) -> tuple[int, ...]:
    several = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in several):
        raise refuse("layers_to_transform", value, "must be a layer's number or a list of them")
    return tuple(several)


def layer_patterns(value: Any) -> tuple[str, ...]:
    found = names("layers_pattern", value)
    several = (found,) if isinstance(found, str) and found else tuple(found)
    return tuple(_regex("layers_pattern", each) for each in several)


def patterns(name: str, value: Any, read: Callable[[str, Any], T]) -> dict[str, T]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refuse(name, value, "must map patterns to numbers")
    return {_regex(name, key): read(f"{name}[{key!r}]", each) for key, each in value.items()}


def modules_to_save(value: Any) -> tuple[str, ...]:
    """Names of modules that were trained whole: the LM head and the token embedding can be."""
    found = names("modules_to_save", value)
    if isinstance(found, str):
        raise refuse("modules_to_save", value, "must be a list of texts")
    for each in found:
        if each.rpartition(".")[2] not in ("lm_head", "embed_tokens"):
            raise refuse(
                "modules_to_save",
                value,
                f"holds {each!r}; only lm_head and embed_tokens can be replaced whole, and heads that classify or "
                "score belong to pooling",
            )
    return found


def token_indices(value: Any) -> dict[str, tuple[int, ...]]:
    """{module: the tokens whose rows are replaced}; a list alone is the token embedding's."""
    name = "trainable_token_indices"
    if value is None:
        return {}
    found: Mapping[Any, Any] = value if isinstance(value, dict) else {"embed_tokens": value}
    for module, ids in found.items():
        if str(module).rpartition(".")[2] not in ("lm_head", "embed_tokens"):
            raise refuse(name, value, f"holds {module!r}; only rows of embed_tokens and lm_head can be replaced")
        good = isinstance(ids, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in ids)
        if not good or not ids or min(ids) < 0 or len(set(ids)) < len(ids):
            raise refuse(name, value, "must list tokens, each from 0 on and once")
    return {module: tuple(ids) for module, ids in found.items()}


def _regex(name: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise refuse(name, pattern, f"is no pattern: {error}") from error
    return pattern
