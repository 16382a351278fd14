"""What there is to know of a task before a model is taught it.

Owns: Task, and the ways of filling templates that the tasks share.
Must not know: models, training.
Invariant: no template, and no word that fills one, is in both a task's training examples and its held-out cases.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")
Turn = dict[str, str]  # of a conversation: its role and content


@dataclass(frozen=True)
class Example:
    """A user's message and the answer wanted. For a held-out case `answer` is what `Task.is_right` compares with."""

    message: str
    answer: str


class Task(ABC):
    """One thing an adapter is taught."""

    name: str
    measure: str
    """What `is_right` says of an answer, as a table's cell."""
    max_tokens: int
    """Longest answer, in tokens."""

    @abstractmethod
    def training(self, draw: random.Random, count: int) -> list[Example]:
        """`count` examples to learn from."""

    @abstractmethod
    def held_out(self, draw: random.Random) -> list[Example]:
        """The cases the adapter is judged by."""

    @abstractmethod
    def prompted(self, message: str) -> list[Turn]:
        """The conversation that gets most from the base model, of those tried: words of instruction, or examples."""

    @abstractmethod
    def is_right(self, case: Example, answer: str) -> bool:
        """Whether the model's `answer` is what was wanted."""


def listed(text: str) -> list[str]:
    """The items of a comma-separated text."""
    return [item.strip() for item in text.split(",")]


def shown(examples: Sequence[Example], message: str) -> list[Turn]:
    """A conversation in which the examples have already been answered."""
    turns: list[Turn] = []
    for example in examples:
        turns += [{"role": "user", "content": example.message}, {"role": "assistant", "content": example.answer}]
    return [*turns, {"role": "user", "content": message}]


def in_turns(draw: random.Random, items: Sequence[Item], count: int) -> list[Item]:
    """`count` items: all of them once, shuffled, then again in another order, and so on: none is met too seldom."""
    chosen: list[Item] = []
    while len(chosen) < count:
        chosen += draw.sample(items, len(items))
    return chosen[:count]
