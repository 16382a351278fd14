"""GGUF files as checkpoints.

Owns: reading a `.gguf` file's metadata as an HF config, and its tensors, dequantized one at a time, under HF names.
Must not know: decoders, kernels.
Invariant: what llama.cpp's converter changed on the way in (names, the order of query and key rows, norm offsets,
rotary frequency factors) is undone here, so that the families see an HF checkpoint.

Metadata keys are those of the GGUF specification (ggml, docs/gguf.md). Configs are mapped here and not by transformers,
whose mapping drops rotary scaling and, for some architectures, the head width.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from izh.errors import ModelLoadError
from izh.model.families import family_of

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
"""GGUF architecture -> HF model_type. Mistral files say llama."""

ROPE_FREQS = "rope_freqs.weight"


class Gguf:
    """One opened file.

    Raises ModelLoadError naming the file and the key, type or architecture at fault.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        self.label = path.name
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ModelLoadError(f"{path}: not a readable GGUF file: {error}") from error
        self.architecture = str(self.get("general.architecture"))
        if self.architecture not in MODEL_TYPES:
            raise ModelLoadError(
                f"{path}: architecture {self.architecture!r} is not supported; supported: {', '.join(MODEL_TYPES)}"
            )
        self.model_type = MODEL_TYPES[self.architecture]
        self._shapes = {tensor.name: tensor.shape.tolist() for tensor in self._reader.tensors}
        self.num_tensors = len(self._shapes) - (ROPE_FREQS in self._shapes)

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value, with {arch} in `key` filled in. Raises when it is absent and there is no default."""
        key = key.format(arch=getattr(self, "architecture", ""))
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise ModelLoadError(f"{self.path}: metadata key {key!r} is missing")
        return default

    def config(self) -> Any:
        """The HF config this file describes."""
        from transformers import AutoConfig

        for key in ("{arch}.expert_count", "{arch}.attn_logit_softcapping"):
            if self.get(key, 0):
                raise ModelLoadError(
                    f"{self.path}: {key.format(arch=self.architecture)}={self.get(key)} is not supported"
                )
        heads = self.get("{arch}.attention.head_count")
        hidden_size = self.get("{arch}.embedding_length")
        head_dim = self.get("{arch}.attention.key_length", hidden_size // heads)
        for key in ("{arch}.attention.value_length", "{arch}.rope.dimension_count"):
            if self.get(key, head_dim) != head_dim:
                raise ModelLoadError(
                    f"{self.path}: {key.format(arch=self.architecture)}={self.get(key)} is not supported, "
                    f"only the head width ({head_dim})"
                )
        kv_heads = self.get("{arch}.attention.head_count_kv", heads)
        if not isinstance(kv_heads, int):
            raise ModelLoadError(f"{self.path}: a different head_count_kv in each layer ({kv_heads}) is not supported")
        stop_keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        stop_ids = sorted({i for key in stop_keys if (i := self.get(key, -1)) >= 0})
        fields: dict[str, Any] = {
            "hidden_size": hidden_size,
            "intermediate_size": self.get("{arch}.feed_forward_length"),
            "num_hidden_layers": self.get("{arch}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": self.get("{arch}.context_length"),
            "rms_norm_eps": self.get("{arch}.attention.layer_norm_rms_epsilon"),
            "vocab_size": self._shapes.get("token_embd.weight", [0, 0])[1],
            "tie_word_embeddings": "output.weight" not in self._shapes,
            "eos_token_id": stop_ids[0] if len(stop_ids) == 1 else stop_ids,
            "bos_token_id": None if (bos := self.get("tokenizer.ggml.bos_token_id", -1)) < 0 else bos,
            "pad_token_id": None if (pad := self.get("tokenizer.ggml.padding_token_id", -1)) < 0 else pad,
        }
        if self.model_type == "gemma3_text":
            fields |= self._gemma3_fields(fields)
        else:
            fields["rope_parameters"] = self._rope()
        if self.model_type in ("llama", "qwen3"):
            fields["attention_bias"] = "blk.0.attn_q.bias" in self._shapes
        return AutoConfig.for_model(self.model_type, **fields)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor as float32 under its HF name, the output head last."""
        from gguf.quants import dequantize

        names = self._hf_names()
        for tensor in sorted(self._reader.tensors, key=lambda tensor: tensor.name == "output.weight"):
            if tensor.name == ROPE_FREQS:  # part of the config
                continue
            try:
                values = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise ModelLoadError(
                    f"{self.path}: tensor {tensor.name!r} has quantization type {tensor.tensor_type.name}, "
                    "which the gguf package cannot dequantize"
                ) from error
            values = torch.from_numpy(np.require(values, np.float32, ["C", "W"]))
            yield names.get(tensor.name, tensor.name), self._restore(tensor.name, values)

    def fingerprint(self) -> bytes:
        stat = self.path.stat()
        return hashlib.sha256(repr((self.path.name, stat.st_size, stat.st_mtime_ns)).encode()).digest()

    def _hf_names(self) -> dict[str, str]:
        """GGUF tensor name -> HF tensor name, for every tensor the family's table knows."""
        import gguf

        num_layers = self.get("{arch}.block_count")
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        table = gguf.get_tensor_name_map(arch, num_layers)
        names: dict[str, str] = {}
        for module in family_of(self.model_type).modules:
            for layer in range(num_layers) if "{i}" in module else [0]:
                hf_module = ("" if module == "lm_head" else "model.") + module.format(i=layer)
                gguf_module = table.get_name(hf_module)
                for suffix in ("weight", "bias") if gguf_module is not None else ():
                    names[f"{gguf_module}.{suffix}"] = f"{hf_module}.{suffix}"
        return names

    def _restore(self, name: str, values: Tensor) -> Tensor:
        """Undo what llama.cpp's converter does to the values."""
        if self.architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            # Rows of a head are stored as pairs (i, i + D/2) side by side; HF keeps the two halves apart.
            kind = "head_count" if ".attn_q." in name else "head_count_kv"
            heads = self.get(f"{{arch}}.attention.{kind}", self.get("{arch}.attention.head_count"))
            pairs = values.unflatten(0, (heads, -1, 2))
            return pairs.transpose(1, 2).reshape(values.shape)
        if self.architecture == "gemma3" and name.endswith("norm.weight"):
            return values - 1.0
        return values

    def _rope(self) -> dict[str, Any]:
        """The one rotary recipe, as transformers' rope_parameters."""
        kind = self.get("{arch}.rope.scaling.type", "none")
        factor = self.get("{arch}.rope.scaling.factor", self.get("{arch}.rope.scale_linear", 1.0))
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.get("{arch}.rope.freq_base", 10000.0)}
        if ROPE_FREQS in self._shapes:
            if kind != "none":
                raise ModelLoadError(f"{self.path}: {ROPE_FREQS} with rope scaling {kind!r} is not supported")
            # Llama 3.1's scaling comes as a divisor for each frequency: longrope with one set for every length.
            freqs = next(tensor for tensor in self._reader.tensors if tensor.name == ROPE_FREQS).data.tolist()
            original = self.get("{arch}.context_length")
            rope |= {"rope_type": "longrope", "short_factor": freqs, "long_factor": freqs, "attention_factor": 1.0}
            return rope | {"original_max_position_embeddings": original}
        if kind == "yarn":
            original = self.get("{arch}.rope.scaling.original_context_length", self.get("{arch}.context_length"))
            return rope | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        if kind == "linear" or (kind == "none" and factor != 1.0):
            return rope | {"rope_type": "linear", "factor": factor}
        if kind != "none":
            raise ModelLoadError(f"{self.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn")
        return rope

    def _gemma3_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Gemma 3's own fields. llama.cpp knows some of them by heart, so the file need not say them."""
        period = self.get("{arch}.attention.sliding_window_pattern", 6)
        num_layers = fields["num_hidden_layers"]
        is_27b = num_layers == 62  # the one size whose scores are scaled by hidden size over heads
        scalar = fields["hidden_size"] // fields["num_attention_heads"] if is_27b else fields["head_dim"]
        return {
            "sliding_window": self.get("{arch}.attention.sliding_window"),
            "layer_types": ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)],
            "query_pre_attn_scalar": scalar,
            "final_logit_softcapping": self.get("{arch}.final_logit_softcapping", 0.0) or None,
            "rope_parameters": {
                "full_attention": self._rope() | {"rope_theta": self.get("{arch}.rope.freq_base", 1_000_000.0)},
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": self.get("{arch}.rope.freq_base_swa", 10_000.0),
                },
            },
        }


@lru_cache(maxsize=1)
def read_gguf(path: Path) -> Gguf:
    """The opened file, kept until the weights are loaded: reading its vocabulary takes seconds."""
    return Gguf(path)
