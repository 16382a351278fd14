"""An encoder's checkpoint with a LoRA adapter added to its weights.

Owns: Adapted, a TensorSource like the checkpoint's own.
Must not know: what the encoder is for.
Invariant: every pair of matrices of the adapter is added exactly once, or reading fails with a ModelLoadError.
"""

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from izh.errors import ModelLoadError
from izh.model.projections import read_json
from izh.model.weights import Safetensors

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


class Adapted:
    """W + (lora_alpha / r) B A, for each W that the adapter has a pair for; the other tensors as they are.

    The adapter is one that PEFT saved, plain LoRA with one rank for all. Source: Hu et al. 2021, section 4.1.
    """

    def __init__(self, base: Safetensors, adapter: Path) -> None:
        self.base = base
        self.label = f"{base.label} with {adapter.name}"
        self.num_tensors = base.num_tensors
        path = adapter / "adapter_config.json"
        config = read_json(path)
        if config["peft_type"] != "LORA":
            raise ModelLoadError(f"{path}: peft_type {config['peft_type']!r} is not supported; it must be 'LORA'")
        for field in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"):
            if config.get(field):
                raise ModelLoadError(f"{path}: {field} = {config[field]!r} is not supported in an encoder's adapter")
        self.scale: float = config["lora_alpha"] / config["r"]
        try:
            self.matrices = load_file(adapter / "adapter_model.safetensors")
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{adapter / 'adapter_model.safetensors'}: {error}") from error

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        left = dict(self.matrices)
        for name, tensor in self.base.tensors():
            module = _PREFIX + name.removesuffix(".weight")
            a, b = left.pop(module + _A, None), left.pop(module + _B, None)
            if a is None or b is None:
                yield name, tensor
                continue
            if (b.shape[0], a.shape[1]) != tensor.shape or a.shape[0] != b.shape[1]:
                raise ModelLoadError(
                    f"{self.label}: A {list(a.shape)} and B {list(b.shape)} do not fit {name!r} {list(tensor.shape)}"
                )
            yield name, tensor.float() + self.scale * (b.float() @ a.float())
        if left:
            raise ModelLoadError(f"{self.label}: {next(iter(left))!r} of the adapter has no place in this encoder")

    def fingerprint(self) -> bytes:
        return self.base.fingerprint()
