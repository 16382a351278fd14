"""Tiny vision-language checkpoints, and what transformers' own model of each says about prompts with images."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import tiny_checkpoint
import torch
from msgspec import structs
from PIL import Image

from izh.engine.core import EngineCore
from izh.model.source import resolve
from izh.multimodal.prompt import VisionPrompt
from izh.multimodal.travel import pack
from izh.multimodal.vlm.load import load_processor
from izh.multimodal.vlm.model import FAMILIES, VisionModel
from izh.request import Request

ROWS_BOUND, BOUND = 1e-5, 1e-4
CHUNKS = (7, 512)  # tokens of a step
NUM_ANSWER = 16
MAX_LENGTH = 1024

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
}
"""A text config's sizes, without `vocab_size`."""

# As checkpoints' templates are, but short: roles, parts in order, each image as its placeholder.
TEMPLATE = (
    "{{% for m in messages %}}<|im_start|>{{{{ m['role'] }}}}\n{{% if m['content'] is string %}}{{{{ m['content'] }}}}"
    "{{% else %}}{{% for p in m['content'] %}}{{% if p['type'] == 'image' %}}{image}{{% else %}}{{{{ p['text'] }}}}"
    "{{% endif %}}{{% endfor %}}{{% endif %}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Soft random colors, so that resizing matters and no two are alike."""
    generator = np.random.default_rng((width, height, seed))
    small = Image.fromarray(generator.integers(0, 256, (5, 7, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


Conversation = list[tuple[str, list[str | Image.Image]]]

CONVERSATIONS: dict[str, Conversation] = {
    "one image": [("user", [picture(40, 40), "what is this?"])],
    "three images": [("user", [picture(40, 40), picture(40, 40, 1), picture(56, 30), "compare them"])],
    "two sizes in text": [("user", ["the dog ", picture(90, 24), " or the fox ", picture(20, 61), " which one?"])],
    "several turns": [
        ("user", ["look: ", picture(33, 47)]),
        ("assistant", ["a brown fox"]),
        ("user", [picture(64, 64), "and this?"]),
    ],
    "text alone": [("user", ["hello world"])],
}


def messages(conversation: Conversation) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """In the OpenAI API's form, and the images."""
    made = [
        {
            "role": role,
            "content": [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image_url", "image_url": {}}
                for part in parts
            ],
        }
        for role, parts in conversation
    ]
    return made, [part for _, parts in conversation for part in parts if not isinstance(part, str)]


def tokenizer(image: str, *special: str, **extra: str) -> Any:
    """`image` is what stands for an image in the template; `special` are tokens of the family's; `extra` are named."""
    made = tiny_checkpoint.tokenizer()
    made.add_special_tokens({"additional_special_tokens": [*special, *extra.values()]})
    for name, token in extra.items():
        made.init_kwargs[name] = token
    if extra:
        made.init_kwargs["extra_special_tokens"] = dict(extra)
    made.chat_template = TEMPLATE.format(image=image)
    return made


def request(name: str, prompt: VisionPrompt, **params: Any) -> Request:
    """One with the prompt's images, packed as they travel."""
    return structs.replace(
        engines.request(name, prompt.token_ids, **params),
        features=pack(prompt.features()) if prompt.image_rows else None,
    )


@dataclass
class Case:
    """A checkpoint as transformers computes it, and as we do."""

    model: Any
    processor: Any
    vision: VisionModel
    loaded: engines.Loaded
    positions: Callable[[Any, Any], tuple[Any, Any]] | None = None  # the family's own, for M-RoPE

    def engine(self, tokens: int) -> EngineCore:
        """An engine as it is always put together, with this many tokens a step."""
        return self.loaded.engine(block_size=4, max_num_seqs=2, max_num_batched_tokens=tokens)

    def official_inputs(self, conversation: Conversation) -> Any:
        made = [
            {
                "role": role,
                "content": [
                    {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
                    for part in parts
                ],
            }
            for role, parts in conversation
        ]
        return self.processor.apply_chat_template(
            made, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )

    @torch.inference_mode()
    def check(self, conversation: Conversation, official_rows: Callable[[Any, Any], Any]) -> VisionPrompt:
        """Tokens, rows, positions, log-probabilities of the prompt, and a greedy answer, by chunks of each size."""
        theirs = self.official_inputs(conversation)
        made, pictures = messages(conversation)
        prepared = self.vision.prepare(pictures)
        layout = self.vision.lay_out(made, prepared)
        assert layout.token_ids == theirs["input_ids"][0].tolist()
        prompt = layout.prompt(self.vision.encode(prepared))
        if pictures:
            rows = torch.stack([prompt.image_rows[place] for place in sorted(prompt.image_rows)])
            expected = official_rows(self.model.model, theirs)
            assert rows.shape == expected.shape
            assert expected.std() > 0.05, "rows that say little would agree with anything"
            assert (rows - expected).abs().max() < ROWS_BOUND
        if self.positions is not None and pictures:
            positions, delta = self.positions(self.model.model, theirs)
            assert torch.equal(prompt.positions, positions[:, 0])
            assert prompt.delta == delta.item()
        logprobs = self.model(**theirs, use_cache=False).logits[0].log_softmax(-1)
        answer = self.model.generate(**theirs, max_new_tokens=NUM_ANSWER, do_sample=False)[0, len(layout.token_ids) :]
        assert len(answer) == NUM_ANSWER
        for tokens in CHUNKS:
            asked = request("a", prompt, max_tokens=NUM_ANSWER, prompt_logprobs=3)
            output = engines.run(self.engine(tokens), asked)["a"]
            assert output.finish.reason == "length", output.finish
            assert output.token_ids == answer.tolist()
            self._check_prompt(output.prompt_logprobs, layout.token_ids, logprobs)
        return prompt

    def _check_prompt(self, ours: Any, token_ids: list[int], theirs: torch.Tensor) -> None:
        assert ours[0] is None
        for place in range(1, len(token_ids)):
            expected = theirs[place - 1]
            assert ours[place].logprob == pytest.approx(expected[token_ids[place]].item(), abs=BOUND)
            for token, logprob in ours[place].top:
                assert logprob == pytest.approx(expected[token].item(), abs=BOUND)


def make(
    folder: Path,
    model_class: Any,
    config: Any,
    tokenizer: Any,
    image_processor: Any,
    processor_options: dict[str, Any] | None = None,
    **options: Any,
) -> Case:
    """Write a random checkpoint and load it both ways."""
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed_tokens" in name:
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, 0.15)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(processor_options or {}))
    image_processor.save_pretrained(folder)
    vision = VisionModel.load(folder)
    official = load_processor(folder, FAMILIES[config.model_type].processor_class)
    return Case(model, official, vision, engines.load(resolve(str(folder))), **options)
