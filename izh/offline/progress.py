"""The bar over work that takes long.

Owns: `progress_bar`. Must not know: what the work is.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(title: str, total: int, show: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, with the rate of tokens. It yields what moves it on, by so many answers and tokens."""
    bar = Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]}"),
        console=Console(stderr=True),
        disable=not show,
    )
    start, num_tokens = time.monotonic(), 0
    task = bar.add_task("", total=total, rate="")

    def advance(num_done: int, tokens: int) -> None:
        nonlocal num_tokens
        num_tokens += tokens
        bar.update(task, advance=num_done, rate=f"{num_tokens / (time.monotonic() - start):.0f} tokens/s")

    with bar:
        yield advance
