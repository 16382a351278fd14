"""Engines on a clock of their own, and tables as rows of text: what the benchmarks' tests share."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from izh.bench import timing


class Clocked:
    """Prefill at 1000 tokens/s, decode at `decode` tokens/s; the last `drift` tokens of an answer are wrong."""

    now = 0.0

    def __init__(self, name: str, decode: float, log: list[str], drift: int = 0) -> None:
        self.name = name
        self.prompts: list[tuple[int, ...]] = []
        self.turns: list[int] = []
        self._decode = decode
        self._log = log
        self._drift = drift

    def answer(self, prompts: list[list[int]], num_tokens: int, turn: int = 0) -> list[list[int]]:
        self.prompts += map(tuple, prompts)
        self.turns.append(turn)
        self._log.append(f"{self.name} {len(prompts)}x{num_tokens}")
        num_prompt = sum(map(len, prompts))
        Clocked.now += num_prompt / 1000 + len(prompts) * (num_tokens - 1) / self._decode
        return [[*range(num_tokens - self._drift), *[-1] * self._drift] for _ in prompts]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the clock to 0, and let the benchmarks read it."""
    Clocked.now = 0.0
    monkeypatch.setattr(timing.time, "perf_counter", lambda: Clocked.now)


def shown(table: Table, width: int = 200) -> tuple[list[list[str]], str]:
    """The table's rows as cells, less the heading, and all of its text."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    rows = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows], text
