"""What a PEFT adapter_config.json says, field by field.

Owns: PeftConfig: the fields that izh computes with; the refusal, by name, of every other field that changes the maths.
Must not know: tensors, the model.
Invariant: a field is honoured, harmless at its value, or refused; none is dropped in silence.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from izh.errors import AdapterError

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
        "eva_config",  # how A and B were initialised: no part of what they compute
        "ensure_weight_tying",
        "megatron_core",
        "qalora_group_size",
    }
)
_INITS = (True, False, "gaussian", "orthogonal", "eva")  # the others also change the base weights


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """A plain, rank-stabilised or DoRA LoRA, and which modules it targets. Names are PEFT's."""

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...]
    layers_pattern: tuple[str, ...]

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "PeftConfig":
        """Raises AdapterError naming the first field that cannot be honoured."""
        if fields.get("peft_type") != "LORA":
            raise AdapterError(f"adapter_config.json: peft_type must be 'LORA', got {fields.get('peft_type')!r}")
        for name, value in fields.items():
            _check(name, value, cls.__dataclass_fields__.keys())
        target = fields.get("target_modules")
        if not target:
            raise AdapterError("adapter_config.json: target_modules is empty; izh needs to know what is adapted")
        indices = fields.get("layers_to_transform")
        return cls(
            r=fields.get("r", 8),
            lora_alpha=fields.get("lora_alpha", 8),
            use_rslora=bool(fields.get("use_rslora")),
            use_dora=bool(fields.get("use_dora")),
            rank_pattern=fields.get("rank_pattern") or {},
            alpha_pattern=fields.get("alpha_pattern") or {},
            target_modules=target if isinstance(target, str) else tuple(target),
            exclude_modules=_names(fields.get("exclude_modules"), keep_text=True),
            layers_to_transform=(indices,) if isinstance(indices, int) else tuple(indices or ()),
            layers_pattern=tuple(_names(fields.get("layers_pattern"), keep_text=False)),
        )

    def rank(self, key: str) -> int:
        """r of the module that PEFT calls `key`."""
        return self.rank_pattern.get(_pattern(self.rank_pattern, key), self.r)

    def scale(self, key: str) -> float:
        """What B A is multiplied by: alpha / r, or alpha / sqrt(r) (Kalajdzievski 2023)."""
        alpha, rank = self.alpha_pattern.get(_pattern(self.alpha_pattern, key), self.lora_alpha), self.rank(key)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, key: str) -> bool:
        """True when PEFT would adapt the linear that it calls `key`."""
        if self._is_excluded(key):
            return False
        if self.target_modules == "all-linear":
            return key != "lm_head" and not key.endswith("embed_tokens")
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, key) is not None
        if key in self.target_modules:
            return True
        if not any(key.endswith(f".{name}") for name in self.target_modules):
            return False
        return not self.layers_to_transform or self._layer(key) in self.layers_to_transform

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


def _check(name: str, value: Any, honoured: Iterable[str]) -> None:
    if name in _HARMLESS or name in honoured or value in (None, False, [], {}):
        return
    if name == "bias" and value == "none":
        return
    if name == "init_lora_weights":
        if value in _INITS:
            return
        raise AdapterError(
            f"adapter_config.json: init_lora_weights {value!r} changes the base weights too; convert the adapter with "
            "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    raise AdapterError(f"adapter_config.json: {name} = {value!r} is not supported; it may change what is computed")


def _names(value: Any, keep_text: bool) -> Any:
    if isinstance(value, str):
        return value if keep_text else (value,)
    return tuple(value or ())


def _pattern(patterns: Iterable[str], key: str) -> str:
    """The first pattern that matches the end of the module's path, as PEFT looks it up; else the path itself."""
    return next((each for each in patterns if re.match(rf"(.*\.)?({each})$", key)), key)
