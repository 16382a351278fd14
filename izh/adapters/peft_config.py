"""What a PEFT adapter_config.json says, field by field.

Owns: PeftConfig: the fields that izh computes with, and what PEFT makes of them for each module.
Must not know: tensors, how a value is read from JSON (`peft_fields` does).
Invariant: a field is honoured, harmless at its value, or refused; none is dropped in silence.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from izh.adapters import peft_fields
from izh.adapters.peft_fields import refuse

_ENDS = ("embed_tokens", "lm_head")


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """A plain, rank-stabilised or DoRA LoRA, which modules it targets, and what it replaces. Names are PEFT's.

    A module's key is its path in the model that was adapted, such as "model.layers.3.self_attn.q_proj".
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    bias: peft_fields.Bias
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...]
    layers_pattern: tuple[str, ...]
    ensure_weight_tying: bool
    modules_to_save: tuple[str, ...]
    trainable_token_indices: Mapping[str, tuple[int, ...]]

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "PeftConfig":
        """Raises AdapterError naming the first field that cannot be honoured, and its value."""
        if fields.get("peft_type") != "LORA":
            raise refuse("peft_type", fields.get("peft_type"), "is not supported, only 'LORA'")
        for name, value in fields.items():
            if name not in cls.__dataclass_fields__:
                peft_fields.refuse_unless_harmless(name, value)
        config = cls(
            r=peft_fields.whole("r", fields.get("r", 8)),
            lora_alpha=peft_fields.number("lora_alpha", fields.get("lora_alpha", 8)),
            use_rslora=peft_fields.flag("use_rslora", fields.get("use_rslora")),
            use_dora=peft_fields.flag("use_dora", fields.get("use_dora")),
            lora_bias=peft_fields.flag("lora_bias", fields.get("lora_bias")),
            bias=peft_fields.bias(fields.get("bias")),
            rank_pattern=peft_fields.patterns("rank_pattern", fields.get("rank_pattern"), peft_fields.whole),
            alpha_pattern=peft_fields.patterns("alpha_pattern", fields.get("alpha_pattern"), peft_fields.number),
            target_modules=peft_fields.names("target_modules", fields.get("target_modules")),
            exclude_modules=peft_fields.names("exclude_modules", fields.get("exclude_modules")),
            layers_to_transform=peft_fields.layers(fields.get("layers_to_transform")),
            layers_pattern=peft_fields.layer_patterns(fields.get("layers_pattern")),
            ensure_weight_tying=peft_fields.flag("ensure_weight_tying", fields.get("ensure_weight_tying")),
            modules_to_save=peft_fields.modules_to_save(fields.get("modules_to_save")),
            trainable_token_indices=peft_fields.token_indices(fields.get("trainable_token_indices")),
        )
        config._check(fields)
        return config

    def _check(self, fields: Mapping[str, Any]) -> None:
        """Fields that have no meaning beside each other: PEFT refuses all of these."""
        if not self.target_modules:
            raise refuse("target_modules", fields.get("target_modules"), "is empty; izh needs to know what is adapted")
        for name in ("layers_to_transform", "layers_pattern"):
            if isinstance(self.target_modules, str) and fields.get(name) is not None:
                raise refuse(name, fields[name], "has no meaning beside a target_modules that is a pattern")
        if self.layers_pattern and fields.get("layers_to_transform") is None:
            raise refuse("layers_pattern", fields["layers_pattern"], "has no meaning without layers_to_transform")
        if self.lora_bias and self.use_dora:
            raise refuse("lora_bias", True, "has no meaning beside use_dora")
        if self.lora_bias and not isinstance(fields.get("init_lora_weights", True), bool):
            raise refuse("lora_bias", True, f"has no meaning beside init_lora_weights {fields['init_lora_weights']!r}")

    def of(self, *, is_tied: bool) -> "PeftConfig":
        """What PEFT makes of it for a model whose head shares the embedding's weights, or does not. Weights that are
        shared and must stay so are saved both if either is."""
        if not is_tied:
            return replace(self, ensure_weight_tying=False)
        return replace(self, modules_to_save=_ENDS) if self.ensure_weight_tying and self.modules_to_save else self

    def rank(self, key: str) -> int:
        """r of the module."""
        return self.rank_pattern.get(_matching(self.rank_pattern, key), self.r)

    def scale(self, key: str) -> float:
        """What B A is multiplied by: alpha / r, or alpha / sqrt(r) (Kalajdzievski 2023)."""
        alpha, rank = self.alpha_pattern.get(_matching(self.alpha_pattern, key), self.lora_alpha), self.rank(key)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, key: str) -> bool:
        """True when PEFT would adapt the linear, or the token embedding, that it calls `key`."""
        if self.saves(key):
            return False
        if self.ensure_weight_tying and _last(key) == "lm_head":  # then PEFT gives the head the embedding's A and B
            return self._ties_the_head
        if self._is_excluded(key):
            return False
        if isinstance(self.target_modules, str):
            if self.target_modules.lower() == "all-linear":
                return _last(key) not in _ENDS
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

    def saves(self, key: str) -> bool:
        """True when the adapter brings a weight in place of the module's own."""
        return any(key.endswith(name) for name in self.modules_to_save)

    def tokens(self, key: str) -> tuple[int, ...]:
        """The tokens whose rows of the module's weight the adapter brings itself."""
        return next((ids for name, ids in self.trainable_token_indices.items() if key.endswith(name)), ())

    @property
    def _ties_the_head(self) -> bool:
        """Of a model whose head shares the embedding's weights: PEFT adapts both if it is told to adapt either."""
        if isinstance(self.target_modules, str):
            return any(re.fullmatch(self.target_modules, name) for name in _ENDS)
        return any(_last(name) in _ENDS for name in self.target_modules)

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


def _matching(patterns: Iterable[str], key: str) -> str:
    """The first pattern that matches the end of the module's path, as PEFT looks it up; else the path itself."""
    return next((each for each in patterns if _matches(each, key)), key)


def _matches(pattern: str, key: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", key) is not None


def _last(key: str) -> str:
    return key.rpartition(".")[2]
