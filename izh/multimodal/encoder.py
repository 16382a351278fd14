"""The vision encoder: pixels become rows of the decoder's width.

Owns: VisionConfig; VisionEncoder with its directory on disk (config.json, model.safetensors).
Must not know: where pixels come from, prompts, the decoder beyond its width.
Invariant: an image's rows depend on its own pixels only.

B = images, P = patches of an image, W = encoder width, D = output width.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from izh.cache.keys import digest
from izh.errors import ModelLoadError

MODEL_TYPE = "izh_vision"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of an encoder: square images of `image_size` pixels in square patches, `layers` layers of `width` with
    `heads` heads, and rows of `output_width`, the decoder's hidden size.

    Raises ValueError when the image does not divide into patches or the width into heads.
    """

    image_size: int
    patch_size: int
    width: int
    heads: int
    layers: int
    output_width: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} must be a positive integer, got {value!r}")
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} does not divide into patches of {self.patch_size}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide into {self.heads} heads")

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches of an image along time, height and width."""
        side = self.image_size // self.patch_size
        return 1, side, side

    @property
    def num_patches(self) -> int:
        """Rows an image becomes, in reading order: top row of patches first, each from left to right."""
        return self.grid[1] * self.grid[2]


class VisionLayer(nn.Module):
    """A pre-norm transformer layer in which every patch sees every other: attention, then a 4x GELU MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv_proj = nn.Linear(width, 3 * width)
        self.o_proj = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, 4 * width)
        self.down_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, P, W] -> [B, P, W]."""
        qkv = self.qkv_proj(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, P, W / heads]
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down_proj(F.gelu(self.up_proj(self.mlp_norm(x))))


class VisionEncoder(nn.Module):
    """[B, 3, H, W] normalized RGB -> [B, P, D]. Randomly initialized; it can be trained, saved and loaded."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.patch_proj = nn.Conv2d(3, width, kernel_size=config.patch_size, stride=config.patch_size)
        self.positions = nn.Parameter(torch.randn(config.num_patches, width) * 0.02)
        self.layers = nn.ModuleList(VisionLayer(width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.projector = nn.Sequential(
            nn.Linear(width, config.output_width), nn.GELU(), nn.Linear(config.output_width, config.output_width)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [B, 3, H, W] in [-1, 1] -> rows [B, P, D]. Raises ValueError for pixels of another shape."""
        size = self.config.image_size
        if pixels.dim() != 4 or tuple(pixels.shape[1:]) != (3, size, size):
            raise ValueError(f"pixels must be [B, 3, {size}, {size}], got {list(pixels.shape)}")
        x = self.patch_proj(pixels).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.projector(self.norm(x))

    def revision(self) -> bytes:
        """32 bytes that name this function: its sizes and the values of its weights. Reads every weight."""
        sizes = [f"{name}={value}" for name, value in asdict(self.config).items()]
        weights: list[bytes | str] = []
        for name, tensor in sorted(self.state_dict().items()):
            raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            weights += [name, str(tensor.dtype), raw]
        return digest("vision encoder", *sizes, *weights)

    def save(self, directory: str | Path) -> None:
        """Write config.json and model.safetensors into `directory`, which is made if missing."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"model_type": MODEL_TYPE, **asdict(self.config)}
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        save_file({name: t.detach().contiguous() for name, t in self.state_dict().items()}, folder / WEIGHTS_FILE)

    @classmethod
    def load(cls, directory: str | Path) -> "VisionEncoder":
        """The encoder that `save` wrote, on the CPU, for inference. Raises ModelLoadError naming the file."""
        folder = Path(directory)
        encoder = cls(_read_config(folder / CONFIG_FILE))
        path = folder / WEIGHTS_FILE
        try:
            encoder.load_state_dict(load_file(path))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ModelLoadError(f"{path}: {error}") from error
        return encoder.eval().requires_grad_(False)


def _read_config(path: Path) -> VisionConfig:
    try:
        config: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: {error}") from error
    if not isinstance(config, dict) or config.pop("model_type", None) != MODEL_TYPE:
        raise ModelLoadError(f"{path}: not the config of a vision encoder (model_type {MODEL_TYPE!r})")
    try:
        return VisionConfig(**config)
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"{path}: {error}") from error
