"""The share of held-out questions that the demo model answers right, asked of the engine that serves it.

Owns: the cases, and the judging: an answer is right when it is the word wanted, and nothing else.
Must not know: training.

    python examples/vision/judge.py                 the eyes in izh/demo_vision
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from questions import ASKED, HELD_OUT, Asked, ask, kinds_of
from scenes import Picture, any_shapes, any_size, held_out_digits, picture_of_digit, picture_of_shapes

from izh import LLM, SamplingParams
from izh.model.demo import demo_vision
from izh.multimodal import VisionPath

NUM_SHAPES = 160
SEED = 1001  # no seed of the training
NUM_SHOWN = 20  # wrong answers printed


@dataclass(frozen=True)
class Case:
    """A question about a picture; `is_new` when no picture was asked about in this wording in training."""

    picture: Picture
    asked: Asked
    is_new: bool


def cases() -> list[Case]:
    """Every held-out digit in a taught wording and in a new one, each time drawn anew; new drawings of shapes, every
    question about each, in either. Sides from 8 pixels (shapes: 24) to 512, all resamplings, light and dark grounds."""
    draw = random.Random(SEED)
    made: list[Case] = []

    def add(picture: Picture, is_new: bool) -> None:
        for about in kinds_of(picture.scene):
            made.append(Case(picture, ask(picture.scene, about, HELD_OUT if is_new else ASKED, draw), is_new))

    for is_new in (False, True):
        for ink, digit in held_out_digits():
            add(picture_of_digit(ink, digit, draw, any_size(draw, 8)), is_new)
        for _ in range(NUM_SHAPES // 2):
            add(picture_of_shapes(any_shapes(draw), draw, any_size(draw, 24)), is_new)
    return made


def answers(directory: Path, asked: Sequence[Case]) -> list[str]:
    """What the demo model says, greedily, all in one batch."""
    llm = LLM("demo", quiet=True, kv_cache_gb=0.5, max_num_seqs=64)
    eyes = VisionPath.load(directory, llm.tokenizer)
    prompts = []
    for case in asked:
        prepared = eyes.prepare([case.picture.image])
        parts = [{"type": "image"}, {"type": "text", "text": case.asked.question}]
        layout = eyes.lay_out([{"role": "user", "content": parts}], prepared)
        prompts.append(layout.prompt(eyes.encode(prepared)))
    outputs = llm.generate(
        [prompt.token_ids for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=12),
        features=[prompt.features() for prompt in prompts],
    )
    return [output.outputs[0].text for output in outputs]


def judge(directory: Path) -> list[str]:
    """Lines of a table: what was asked about, and the shares right; prints some wrong answers."""
    asked = cases()
    said = answers(directory, asked)
    wrong = [(case, text) for case, text in zip(asked, said, strict=True) if text != case.asked.answer]
    for case, text in wrong[:NUM_SHOWN]:
        print(f"WRONG: {case.asked.question!r} of {case.picture.scene}, {case.picture.image.width} pixels: {text!r}")
    lines = []
    for about in HELD_OUT:
        cells = [about]
        for is_new in (False, True):
            of_these = [case for case in asked if (case.asked.about, case.is_new) == (about, is_new)]
            num_wrong = sum((case.asked.about, case.is_new) == (about, is_new) for case, _ in wrong)
            cells.append(f"{1 - num_wrong / len(of_these):.1%} of {len(of_these)}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(judge(demo_vision())))
