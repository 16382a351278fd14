"""A random model that sees, to measure with where no trained one can be had, and photographs to show it.

Owns: the checkpoint's sizes and files; photographs. Must not know: engines, clocks.
Invariant: the same shape gives the same checkpoint at every run, and the same seed the same photograph.

The checkpoint is a Qwen2-VL as transformers writes it: what an engine computes for it does not depend on its values.
"""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

_MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TURNS = ("<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGE = 2  # patches along each side of what becomes one row


@dataclass(frozen=True, kw_only=True)
class SeeingShape:
    """Sizes. An image is shrunk to at most `side` x `side` pixels, and each square of 2 x 2 patches becomes one row."""

    tower_layers: int
    tower_width: int
    tower_heads: int
    patch_size: int
    side: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    intermediate: int

    @property
    def title(self) -> str:
        patches = (self.side // self.patch_size) ** 2
        tower = self.tower_layers * 12 * self.tower_width**2 / 1e6
        return (
            f"random Qwen2-VL: tower of {self.tower_layers} layers x {self.tower_width} ({tower:.0f} M), up to "
            f"{patches} patches, {patches // _MERGE**2} rows; decoder of {self.layers} x {self.width}"
        )


MEASURED = SeeingShape(
    tower_layers=12,
    tower_width=768,
    tower_heads=12,
    patch_size=14,
    side=560,
    layers=30,
    width=576,
    heads=9,
    kv_heads=3,
    intermediate=1536,
)
"""A ViT-B in front of a decoder of SmolLM2-135M's sizes, which a machine of few cores answers within seconds."""


def write_checkpoint(folder: Path, shape: SeeingShape) -> None:
    """Weights, config, tokenizer and processor of the shape, float32."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = _tokenizer()
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(_MEDIA))
    pairs = shape.width // shape.heads // 2
    sections = [pairs - 2 * (pairs * 3 // 8), pairs * 3 // 8, pairs * 3 // 8]
    config = Qwen2VLConfig(
        vision_config={
            "depth": shape.tower_layers,
            "embed_dim": shape.tower_width,
            "num_heads": shape.tower_heads,
            "hidden_size": shape.width,
            "patch_size": shape.patch_size,
            "spatial_merge_size": _MERGE,
        },
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": shape.width,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": 8192,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    generator = torch.random.get_rng_state()
    torch.manual_seed(0)
    model: Any = Qwen2VLForConditionalGeneration._from_config(config, dtype=torch.float32)
    torch.random.set_rng_state(generator)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({}))
    images: Any = Qwen2VLImageProcessorPil(
        patch_size=shape.patch_size,
        merge_size=_MERGE,
        max_pixels=shape.side**2,
        min_pixels=(_MERGE * shape.patch_size) ** 2,
    )
    images.save_pretrained(folder)


def photograph(seed: int, width: int, height: int) -> bytes:
    """A JPEG as cameras make them: soft shapes under fine grain, so that it compresses about as they do."""
    generator = np.random.default_rng(seed)
    soft = Image.fromarray(generator.integers(0, 256, (12, 16, 3), np.uint8))
    shapes = np.asarray(soft.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    grain = generator.integers(-8, 9, (height, width, 1), np.int16)
    out = io.BytesIO()
    Image.fromarray(np.clip(shapes + grain, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def _tokenizer() -> Any:
    """One token for each byte, and those that the template writes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(alphabet, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, pad_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=_TEMPLATE
    )
    made.add_special_tokens({"additional_special_tokens": [*_TURNS, *_MEDIA]})
    return made
