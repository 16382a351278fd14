"""What the command makes of what was timed: agreement, ratios, a table."""

import clocked
import pytest

from izh.bench.throughput import figures, table
from izh.bench.timing import rates

DOCUMENT = {
    "model": "demo",
    "dtype": "fp32",
    "machine": {"processor": "cpu", "threads": 2, "torch": "2"},
    "options": {"prompt_tokens": 128, "repeats": 3},
    "date": "today",
}


def test_every_engine_is_compared_with_the_first() -> None:
    ours = rates("izh", 2, 128, 2, [1.0], [2.0])
    theirs = rates("transformers", 2, 128, 2, [1.0], [3.0])
    first, second = figures([(ours, [[1, 2], [3, 4]]), (theirs, [[1, 2], [3, 5]])])
    assert (first.engine, first.agreement) == ("izh", 1.0)
    assert (second.engine, second.agreement) == ("transformers", 0.75)
    assert (second.prefill, second.decode) == (pytest.approx(256), pytest.approx(2))


def test_the_table_shows_rates_and_ratios() -> None:
    ours = rates("izh", 8, 128, 64, [1.024], [2.048])
    theirs = rates("transformers", 8, 128, 64, [2.048], [4.096])
    cells, text = clocked.shown(table(figures([(ours, [[1, 2]]), (theirs, [[1, 3]])]), DOCUMENT))
    assert cells == [
        ["8", "izh", "1000", "", "500", "", ""],
        ["", "transformers", "500", "2.00", "250", "2.00", "50.0%"],
    ]
    assert "cpu, 2 threads, torch 2; median of 3; today" in text
