"""Prompts with images made of numbers: lengths of text and grids of images in a row."""

from concurrent.futures import Future

import torch

from izh.multimodal.features import Features, validate_features
from izh.multimodal.gate import ImageGate
from izh.multimodal.prompt import VisionPrompt, expand_images
from izh.sequence import Sequence

HIDDEN, HEAD_DIM, SECTIONS, PLACEHOLDER = 64, 16, (2, 3, 3), 7


def prompt(*layout: int | tuple[int, int, int], seed: int = 0, width: int = HIDDEN) -> VisionPrompt:
    """A number is that many tokens of text (ids from 10), a triple an image of that grid with random rows.

    Texts and images at the same place of two layouts with one seed are the same.
    """
    ids: list[int] = []
    rows, grids = [], []
    for place, part in enumerate(layout):
        generator = torch.Generator().manual_seed(1000 * seed + place)
        if isinstance(part, int):
            ids += torch.randint(10, 190, (part,), generator=generator).tolist()
        else:
            ids.append(PLACEHOLDER)
            grids.append(part)
            rows.append(torch.randn(part[0] * part[1] * part[2], width, generator=generator))
    return expand_images(ids, PLACEHOLDER, rows, grids, SECTIONS)


def features(made: VisionPrompt, **changed: object) -> Features:
    """What the engine makes of a prompt's features, some fields replaced."""
    return validate_features(
        made.features() | changed, num_tokens=len(made.token_ids), hidden_size=HIDDEN, rotary_dim=HEAD_DIM
    )


def checked(found: Features | None) -> Future[Features] | None:
    """As a gate is given them: checked already."""
    if found is None:
        return None
    done: Future[Features] = Future()
    done.set_result(found)
    return done


def admit(gate: ImageGate, sequence: Sequence) -> None:
    """As the engine does."""
    assert gate.prepare(sequence) is None
    gate.open(sequence)
