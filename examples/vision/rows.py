"""What an image's rows say: the facts of its scene, in the language model's own terms.

Owns: the facts; Rows, which puts the rows of a scene together from them. `wish.py` teaches it what the language model
would like to see, `tower.py` teaches the encoder to make the same of pixels.
Must not know: pixels, questions.
"""

from collections.abc import Callable, Sequence

import torch
from scenes import COLOURS, COUNTS, PLACES, SHAPES, Scene
from torch import Tensor, nn

SIDE = 4  # rows of an image, along each side
NUM_ROWS = SIDE * SIDE
SECTIONS = (16, 8, 8)  # frequency pairs that turn with time, height and width: 32, as a head has 64 numbers
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ALONG = (*PLACES, "around")  # several shapes have no place
FACTS: dict[str, tuple[str, ...]] = {
    "kind": ("digit", "shapes"),
    "digit": tuple(map(str, range(10))),
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "count": tuple(map(str, COUNTS)),
    "place": ALONG,
}
# The words that the rows begin as; "<digit>" is the scene's. The model knows what words mean.
FIRST_WORDS = {
    "digit": "The| image| shows| the| digit|<digit>| <word>|.| The| number| is|<digit>|.| Answer|:|<digit>",
    "shapes": "The| image| shows|<count>| <colour>| <shape>|.| Color|:| <colour>|.| Shape|:| <shape>| <one>| <two>",
}


def facts_of(scene: Scene) -> dict[str, int]:
    """The index of each fact's value that is true of the scene."""
    if scene.digit is not None:
        return {"kind": 0, "digit": scene.digit}
    values = {"colour": scene.colour, "shape": scene.shape, "count": str(scene.count), "place": scene.place or "around"}
    return {"kind": 1} | {name: FACTS[name].index(value) for name, value in values.items()}


class Rows(nn.Module):
    """Rows [16, D] of a scene: the sum, over its facts, of what each adds to each row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tables = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros(len(values), NUM_ROWS, width)) for name, values in FACTS.items()}
        )

    def forward(self, scenes: Sequence[Scene]) -> Tensor:
        """[B, 16, D]."""
        return torch.stack(
            [
                torch.stack([self.tables[name][value] for name, value in facts_of(scene).items()]).sum(0)
                for scene in scenes
            ]
        )

    @torch.no_grad()
    def begin_as_words(self, encode: Callable[[str], list[int]], embeddings: Tensor) -> None:
        """Every row as the word of FIRST_WORDS in its place."""

        def word(text: str) -> Tensor:
            (token,) = encode(text)
            return embeddings[token]

        for kind, name in enumerate(FACTS["kind"]):
            for row, text in enumerate(FIRST_WORDS[name].split("|")):
                if "<" not in text:
                    self.tables["kind"][kind, row] = word(text)
                    continue
                space, _, fact = text.rstrip(">").rpartition("<")
                table = {"word": "digit", "one": "place", "two": "place"}.get(fact, fact)
                for index, value in enumerate(FACTS[table]):
                    if fact == "word":
                        value = DIGITS[index]
                    elif fact in ("one", "two"):
                        value = value.split()[0 if fact == "one" else -1]
                    self.tables[table][index, row] = word(space + value)
