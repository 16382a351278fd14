"""Sentences to measure with: random ones of everyday words, the same at every run.

Owns: SHORT and MIXED, the shapes that are measured, and the words. Must not know: tokenizers, models.
"""

import random
from dataclasses import dataclass

_WORDS = """
    the of and to in a is that it was for on are with as his they at be this from have or by one had not but what all
    were when we there can an your which their said if do will each about how up out them then she many some so these
    would other into has more her two like him see time could no make than first been its who now people my made over
    did down only way find use may water long little very after words called just where most know garden winter
    engine market letter river teacher window history evening kitchen mountain question problem machine animal
    language village station doctor bridge island music story paper summer colour number answer measure
"""


@dataclass(frozen=True, slots=True)
class TextShape:
    """Words in a sentence, from the fewest to the most, every number alike."""

    title: str
    fewest: int
    most: int

    def take(self, count: int, seed: int = 0) -> list[str]:
        """Sentences; another seed gives others."""
        source, words = random.Random(seed), _WORDS.split()
        return [" ".join(source.choices(words, k=source.randint(self.fewest, self.most))) + "." for _ in range(count)]


SHORT = TextShape("short", 6, 16)
MIXED = TextShape("mixed", 6, 80)
