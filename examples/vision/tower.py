"""The vision encoder learns to see, and then to put what it sees into rows.

Owns: pictures to learn from; `look`, which trains an encoder's tower to tell the facts of a scene, and `tell`, which
trains tower and projector to make the rows that the language model would like to see (see rows.py).
Must not know: questions, the language model.
"""

import copy
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rows import FACTS, Rows, facts_of
from scenes import Picture, any_shapes, any_size, picture_of_digit, picture_of_shapes, training_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from izh.multimodal import VisionConfig, VisionEncoder, VisionProcessor

CONFIG = VisionConfig(image_size=32, patch_size=8, width=128, heads=4, layers=4, output_width=576)
BATCH = 64
SEED = 1


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long, and how fast."""

    steps: int
    learning_rate: float
    telling: float = 0.0  # weight of the rows beside that of the facts


LOOK = Schedule(steps=6000, learning_rate=1e-3)
TELL = Schedule(steps=2500, learning_rate=6e-4, telling=2.0)


class Seer(nn.Module):
    """An encoder, and a head for each fact, which is only there for the training."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = VisionEncoder(CONFIG)
        self.heads = nn.ModuleDict({name: nn.Linear(CONFIG.width, len(values)) for name, values in FACTS.items()})

    def forward(self, pixels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The encoder's rows [B, 16, D], and each fact's logits [B, values]."""
        seen: list[Tensor] = []
        hook = self.encoder.norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
        rows = self.encoder(pixels)
        hook.remove()
        return rows, {name: head(seen[0].mean(1)) for name, head in self.heads.items()}


def pictures(draw: random.Random, count: int) -> list[Picture]:
    """Digits and shapes, two to one."""
    digits = training_digits()
    return [
        picture_of_digit(*draw.choice(digits), draw, any_size(draw, 8, 64), bend=draw.random() < 0.9)
        if index % 3
        else picture_of_shapes(any_shapes(draw), draw, any_size(draw, 24, 128))
        for index in range(count)
    ]


def pixels_of(shown: Sequence[Picture]) -> Tensor:
    """[B, 3, 32, 32], as the server prepares them."""
    processor = VisionProcessor(CONFIG)
    return torch.stack([processor.prepare(picture.image).pixels for picture in shown])


def loss_of(logits: dict[str, Tensor], shown: Sequence[Picture]) -> Tensor:
    """Mean over the pictures of the cross-entropy of what is true of each, in nats."""
    facts = [facts_of(picture.scene) for picture in shown]
    total = torch.zeros(())
    for name, values in logits.items():
        which = [index for index, each in enumerate(facts) if name in each]
        if which:
            wanted = torch.tensor([facts[index][name] for index in which])
            total = total + cross_entropy(values[which], wanted, label_smoothing=0.05) * len(which) / len(facts)
    return total


def train(seer: Seer, schedule: Schedule, rows: Rows | None, name: str) -> Seer:
    """The seer after its lessons: the running mean of its weights, which sees better than the last of them."""
    draw = random.Random(SEED)
    optimizer = torch.optim.AdamW(seer.parameters(), lr=schedule.learning_rate, weight_decay=0.05, betas=(0.9, 0.98))
    slope = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / 100, 0.02 + 0.49 * (1 + math.cos(math.pi * step / schedule.steps))),
    )
    mean = copy.deepcopy(seer)
    scale = 1.0 if rows is None else _spread(rows)
    start = time.monotonic()
    for step in range(1, schedule.steps + 1):
        shown = pictures(draw, BATCH)
        made, logits = seer(pixels_of(shown))
        loss = loss_of(logits, shown)
        if rows is not None:
            loss = loss + schedule.telling * (made - _wanted(rows, shown)).square().mean() / scale
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(seer.parameters(), 1.0)
        optimizer.step()
        slope.step()
        with torch.no_grad():
            keep = min(0.998, step / (step + 10))
            for average, parameter in zip(mean.parameters(), seer.parameters(), strict=True):
                average.lerp_(parameter, 1 - keep)
        if step % 250 == 0:
            print(f"{name} step {step}: loss {loss.item():.3f}, {time.monotonic() - start:.0f} s", flush=True)
    return mean


@torch.no_grad()
def _wanted(rows: Rows, shown: Sequence[Picture]) -> Tensor:
    """[B, 16, D]."""
    return rows([picture.scene for picture in shown])


def _spread(rows: Rows) -> float:
    """Mean squared distance of scenes' rows from their mean, per number: what the loss of a blind encoder would be."""
    many = _wanted(rows, pictures(random.Random(SEED), 300))
    return float((many - many.mean(0)).square().mean())
