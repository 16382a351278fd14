"""What rows the language model would like to see for each scene, found by asking it.

Owns: conversations about scenes, packed into one sequence in which whatever they begin with alike is there once; and
`wish`, which learns Rows. The language model is frozen: gradients pass through it to the rows.
Must not know: pixels.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from questions import ASKED, ask, kinds_of
from rows import NUM_ROWS, SECTIONS, SIDE, Rows
from scenes import Scene, any_shapes
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from izh.multimodal import mrope_cos_sin
from izh.text.tokenizer import Tokenizer

IMAGE = -1  # stands for an image in token ids
SYSTEMS = (
    None,  # the template's own
    None,
    None,
    "You are a helpful assistant.",
    "Answer briefly.",
    "You look at pictures and answer questions about them.",
)
SCENES = 8  # in a step, half of them digits
DESCRIBED = 0.08  # of the questions; a description has several times the tokens of another answer, and so its weight
STEPS = 240
LEARNING_RATE = 5e-3
SEED = 1


class Evenly(random.Random):
    """A random stream in which `choice` takes every item of a sequence before it takes any of them again."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._left: dict[tuple[object, ...], list[object]] = {}

    def choice(self, seq: Any) -> Any:
        """One of the items that are left, and of all of them when none is."""
        left = self._left.setdefault(tuple(seq), [])
        if not left:
            left += self.sample(seq, len(seq))
        return left.pop()


@dataclass(frozen=True)
class Talk:
    """A conversation about one scene: token ids with IMAGE where its image is, and the places of answers' tokens."""

    scene: int
    ids: list[int]
    answers: list[int]


@dataclass(frozen=True)
class Pack:
    """Conversations as one sequence of T places, a tree: each place sees those that it follows, and itself.

    `rows` and `images` are the places of rows, and their scenes, 16 places for each. Row `before[i]` of the output
    predicts `answers[i]`.
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [3, T]
    mask: Tensor  # [1, 1, T, T]
    rows: Tensor
    images: list[int]
    before: Tensor
    answers: Tensor


def pack(talks: Sequence[Talk]) -> Pack:
    """Put the conversations together; what several begin with, an image of the same scene included, is there once."""
    # A node is the places of one symbol: (places, cursor behind it).
    children: dict[tuple[int, int, int], tuple[int, int]] = {}  # (last place before, symbol, scene) -> (last, cursor)
    ids: list[int] = []
    coordinates: list[tuple[int, int, int]] = []
    parents: list[int] = []
    rows: list[int] = []
    images: list[int] = []
    before: list[int] = []
    answers: list[int] = []
    for talk in talks:
        last, cursor = -1, 0
        wanted = set(talk.answers)
        for place, symbol in enumerate(talk.ids):
            if place in wanted:
                before.append(last)
                answers.append(symbol)
            key = (last, symbol, talk.scene if symbol == IMAGE else -1)
            if key not in children:
                if symbol == IMAGE:
                    rows += range(len(ids), len(ids) + NUM_ROWS)
                    images.append(talk.scene)
                grid = [(0, h, w) for h in range(SIDE) for w in range(SIDE)] if symbol == IMAGE else [(0, 0, 0)]
                previous = last
                for t, h, w in grid:
                    parents.append(previous)
                    previous = len(ids)
                    ids.append(0 if symbol == IMAGE else symbol)
                    coordinates.append((cursor + t, cursor + h, cursor + w))
                children[key] = previous, cursor + (SIDE if symbol == IMAGE else 1)
            last, cursor = children[key]
    mask = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for place, parent in enumerate(parents):
        if parent >= 0:
            mask[place] = mask[parent]
        mask[place, place] = True
    return Pack(
        torch.tensor(ids),
        torch.tensor(coordinates).T,
        mask[None, None],
        torch.tensor(rows),
        images,
        torch.tensor(before),
        torch.tensor(answers),
    )


def loss_of(model: nn.Module, packed: Pack, rows: Tensor) -> Tensor:
    """Mean cross-entropy of the answers' tokens, in nats; `rows` [images, 16, D] in the pack's order of images."""
    decoder, config = model.model, model.config
    x = decoder.embed_tokens(packed.token_ids).index_copy(0, packed.rows, rows.flatten(0, 1))[None]
    theta = config.rope_parameters["rope_theta"]
    cos, sin = mrope_cos_sin(packed.positions, config.head_dim, theta, SECTIONS, x.dtype)
    turns = torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]
    for layer in decoder.layers:
        x = layer(x, attention_mask=packed.mask, position_embeddings=turns)
    hidden = decoder.norm(x)[0]
    return nn.functional.cross_entropy(model.lm_head(hidden[packed.before]), packed.answers)


def talk(tokenizer: Tokenizer, draw: random.Random, index: int, scene: Scene, system: str | None) -> Talk:
    """One or two questions about the scene and their answers, the image before the first one or behind it."""
    messages: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
    ids: list[int] = []
    answers: list[int] = []
    for turn in range(1 + (draw.random() < 0.25)):
        about = "all" if draw.random() < DESCRIBED else draw.choice(kinds_of(scene))
        asked = ask(scene, about, ASKED, draw)
        parts: list[dict[str, str]] = [{"type": "text", "text": asked.question}] if asked.question else []
        if turn == 0:
            parts = [{"type": "image"}, *parts] if draw.random() < 0.75 else [*parts, {"type": "image"}]
        messages.append({"role": "user", "content": parts or "Describe it."})
        prompt = tokenizer.chat(messages, image_id=IMAGE)
        ids = prompt + tokenizer.encode(f"{asked.answer}<|im_end|>", add_special_tokens=False)
        answers += range(len(prompt), len(ids))
        messages.append({"role": "assistant", "content": asked.answer})
    return Talk(index, ids, answers)


def lesson(tokenizer: Tokenizer, draw: random.Random) -> tuple[list[Scene], Pack]:
    """Scenes, and a pack of conversations about them under one system message."""
    system = draw.choice(SYSTEMS)
    scenes = [any_shapes(draw) if index % 2 else Scene(digit=draw.choice(range(10))) for index in range(SCENES)]
    return scenes, pack(
        [
            talk(tokenizer, draw, index, scene, system)
            for index, scene in enumerate(scenes)
            for _ in range(2 if scene.digit is not None else 4)
        ]
    )


def wish(model_directory: Path) -> Rows:
    """The rows from which the language model answers best. Prints the loss as it goes."""
    tokenizer = Tokenizer.load(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval().requires_grad_(False)
    embeddings = model.get_input_embeddings().weight
    rows = Rows(embeddings.shape[1])
    rows.begin_as_words(lambda text: tokenizer.encode(text, add_special_tokens=False), embeddings)
    optimizer = torch.optim.Adam(rows.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    slope = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, max(0.05, (STEPS - step) / (0.6 * STEPS)))
    )
    draw, recent, start = Evenly(SEED), [], time.monotonic()
    for step in range(1, STEPS + 1):
        scenes, packed = lesson(tokenizer, draw)
        loss = loss_of(model, packed, rows([scenes[index] for index in packed.images]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slope.step()
        recent = [*recent, loss.item()][-10:]
        if step % 10 == 0:
            mean = sum(recent) / len(recent)
            print(f"rows step {step}: loss {mean:.3f}, {time.monotonic() - start:.0f} s", flush=True)
    return rows
