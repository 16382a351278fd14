"""What a PEFT adapter_config.json says, field by field.

Owns: PeftConfig: the fields that izh computes with; the refusal, by name, of every other field that changes the maths.
Must not know: tensors, the model.
Invariant: a field is honoured, harmless at its value, or refused; none is dropped in silence.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from izh.errors import AdapterError

FILE = "adapter_config.json"
Bias = Literal["none", "lora_only", "all"]
T = TypeVar("T")

_HARMLESS = frozenset(
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
_EMPTY_IS_ABSENT = frozenset({"modules_to_save", "target_parameters", "layer_replication", "loftq_config"})
_UNUSABLE = "adapter_config.json: {} = {!r} is not supported; it may change what is computed"


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """A plain, rank-stabilised or DoRA LoRA, and which modules it targets. Names are PEFT's.

    A module's key is its path in the model that was adapted, such as "model.layers.3.self_attn.q_proj".
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    bias: Bias
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...]
    layers_pattern: tuple[str, ...]
    ensure_weight_tying: bool

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "PeftConfig":
        """Raises AdapterError naming the first field that cannot be honoured."""
        if fields.get("peft_type") != "LORA":
            raise AdapterError(f"{FILE}: peft_type must be 'LORA', got {fields.get('peft_type')!r}")
        for name, value in fields.items():
            if name not in cls.__dataclass_fields__:
                _refuse_unless_harmless(name, value)
        config = cls(
            r=_whole("r", fields.get("r", 8)),
            lora_alpha=_number("lora_alpha", fields.get("lora_alpha", 8)),
            use_rslora=_flag("use_rslora", fields),
            use_dora=_flag("use_dora", fields),
            bias=_bias(fields.get("bias")),
            rank_pattern=_pattern("rank_pattern", fields.get("rank_pattern"), _whole),
            alpha_pattern=_pattern("alpha_pattern", fields.get("alpha_pattern"), _number),
            target_modules=_names("target_modules", fields.get("target_modules")),
            exclude_modules=_names("exclude_modules", fields.get("exclude_modules")),
            layers_to_transform=_layers(fields.get("layers_to_transform")),
            layers_pattern=_layer_patterns(fields.get("layers_pattern")),
            ensure_weight_tying=_flag("ensure_weight_tying", fields),
        )
        if not config.target_modules:
            raise AdapterError(f"{FILE}: target_modules is empty; izh needs to know what is adapted")
        for name in ("layers_to_transform", "layers_pattern"):
            if isinstance(config.target_modules, str) and fields.get(name) is not None:
                raise AdapterError(f"{FILE}: {name} has no meaning beside a target_modules that is a pattern")
        if config.layers_pattern and fields.get("layers_to_transform") is None:
            raise AdapterError(f"{FILE}: layers_pattern has no meaning without layers_to_transform")
        return config

    def rank(self, key: str) -> int:
        """r of the module."""
        return self.rank_pattern.get(_matching(self.rank_pattern, key), self.r)

    def scale(self, key: str) -> float:
        """What B A is multiplied by: alpha / r, or alpha / sqrt(r) (Kalajdzievski 2023)."""
        alpha, rank = self.alpha_pattern.get(_matching(self.alpha_pattern, key), self.lora_alpha), self.rank(key)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, key: str) -> bool:
        """True when PEFT would adapt the linear, or the token embedding, that it calls `key`."""
        if self.ensure_weight_tying and _last(key) == "lm_head":  # then PEFT gives the head the embedding's A and B
            return self._ties_the_head
        if self._is_excluded(key):
            return False
        if isinstance(self.target_modules, str):
            if self.target_modules.lower() == "all-linear":
                return _last(key) not in ("lm_head", "embed_tokens")
            return re.fullmatch(self.target_modules, key) is not None
        if key in self.target_modules:
            return True
        if not any(key.endswith(f".{name}") for name in self.target_modules):
            return False
        return not self.layers_to_transform or self._layer(key) in self.layers_to_transform

    def ambiguous(self, key: str) -> str | None:
        """The field, if any, of whose patterns several match the module with different values. PEFT takes the first in
        the file, where they are sorted; the model in training took the first that was written."""
        for name, patterns in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern)):
            if len({value for pattern, value in patterns.items() if _matches(pattern, key)}) > 1:
                return name
        return None

    def trains_bias(self, key: str) -> bool:
        """True when the adapter may bring a bias in place of the linear's own."""
        return self.bias == "all" or (self.bias == "lora_only" and self.targets(key))

    @property
    def _ties_the_head(self) -> bool:
        """Of a model whose head shares the embedding's weights: PEFT adapts both if it is told to adapt either."""
        if isinstance(self.target_modules, str):
            return any(re.fullmatch(self.target_modules, name) for name in ("embed_tokens", "lm_head"))
        return any(_last(name) in ("embed_tokens", "lm_head") for name in self.target_modules)

    def _is_excluded(self, key: str) -> bool:
        if isinstance(self.exclude_modules, str):
            return re.fullmatch(self.exclude_modules, key) is not None
        return any(key == name or key.endswith(f".{name}") for name in self.exclude_modules)

    def _layer(self, key: str) -> int | None:
        """The layer index in a module's path, as PEFT finds it."""
        patterns = [rf"(?:^|.*?\.){each}\.(?P<index>\d+)\." for each in self.layers_pattern]
        for pattern in patterns or [r".*?\.[^.]*\.(?P<index>\d+)\."]:
            if match := re.match(pattern, key):
                return int(match["index"])
        return None


def _refuse_unless_harmless(name: str, value: Any) -> None:
    if name in _HARMLESS or value is None or value is False:
        return
    if name in _EMPTY_IS_ABSENT and value in ([], {}):
        return
    if name == "init_lora_weights":
        if (value.lower() if isinstance(value, str) else value) in _INITS:
            return
        raise AdapterError(
            f"{FILE}: init_lora_weights {value!r} may change the base weights too; convert the adapter with "
            "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    raise AdapterError(_UNUSABLE.format(name, value))


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise AdapterError(f"{FILE}: {name} must be a whole number from 1 on, got {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise AdapterError(f"{FILE}: {name} must be a number, got {value!r}")
    return value


def _flag(name: str, fields: Mapping[str, Any]) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"{FILE}: {name} must be true or false, got {value!r}")
    return bool(value)


def _bias(value: Any) -> Bias:
    if value is None:
        return "none"
    if value not in get_args(Bias):
        raise AdapterError(f"{FILE}: bias must be one of {', '.join(map(repr, get_args(Bias)))}, got {value!r}")
    return value


def _names(name: str, value: Any) -> str | tuple[str, ...]:
    """A pattern as text, or a list of names."""
    if isinstance(value, str):
        return _regex(name, value)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise AdapterError(f"{FILE}: {name} must be text or a list of texts, got {value!r}")
    return tuple(value)


def _layers(value: Any) -> tuple[int, ...]:
    several = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in several):
        raise AdapterError(f"{FILE}: layers_to_transform must be a layer's number or a list of them, got {value!r}")
    return tuple(several)


def _layer_patterns(value: Any) -> tuple[str, ...]:
    names = _names("layers_pattern", value)
    several = (names,) if isinstance(names, str) and names else tuple(names)
    return tuple(_regex("layers_pattern", each) for each in several)


def _pattern(name: str, value: Any, number: Callable[[str, Any], T]) -> dict[str, T]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise AdapterError(f"{FILE}: {name} must map patterns to numbers, got {value!r}")
    return {_regex(name, key): number(f"{name}[{key!r}]", each) for key, each in value.items()}


def _regex(name: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise AdapterError(f"{FILE}: {name} holds {pattern!r}, which is no pattern: {error}") from error
    return pattern


def _matching(patterns: Iterable[str], key: str) -> str:
    """The first pattern that matches the end of the module's path, as PEFT looks it up; else the path itself."""
    return next((each for each in patterns if _matches(each, key)), key)


def _matches(pattern: str, key: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", key) is not None


def _last(key: str) -> str:
    return key.rpartition(".")[2]
