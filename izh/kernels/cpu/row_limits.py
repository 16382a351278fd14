"""Up to how many rows izh's own kernel is the fastest way through a linear layer on this machine.

Owns: RowLimits; measuring them, and where what was measured is kept.
Must not know: models, beyond the width of their rows.
Invariant: a limit decides which kernel computes, and so the speed and the rounding; every kernel is exact.

The others are the vendor's: oneDNN where the weights lie a second time in its order (`frozen.py`), else whatever torch
has, MKL as a rule. Which is ahead depends on the processor: MKL leaves AVX-512 unused on AMD's, so there it never is.
"""

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

import numba
import torch
import torch.nn.functional as F
from llvmlite.binding import get_host_cpu_name
from torch import Tensor

from izh.kernels.cpu.compile import CACHE_FOLDER
from izh.kernels.cpu.frozen import freeze_linear
from izh.kernels.cpu.linear import linear
from izh.kernels.cpu.simd import LANES

log = logging.getLogger("izh.kernels")

ANY_ROWS = 2**31 - 1
_ROWS = (1, 4, 16, 32, 64, 128, 256, 512)  # measured; beyond the last nothing changes any more
_FLOATS = 2**21  # of one weight
_WEIGHTS = 4  # in turn, so that the last cache does not hold the next one
_REPEATS = 3
_APART_S = 15e-6  # that a projection takes longer where a step's layers are not one call: 2 ms for 120 of them
_QUIET = 0.85  # of the processors' time: less while it measures, and something else is running
_FILE = "row-limits.json"


@dataclass(frozen=True)
class RowLimits:
    """Rows up to which izh's kernel is used: where the weight lies once, as in the checkpoint, and where the vendor's
    product has it in an order of its own. 0 for none, ANY_ROWS for all. Beside the second, all layers of a step within
    the limit are one call (`decoder.py`), which counts in the kernel's favour."""

    plain: int
    packed: int


USUAL = RowLimits(plain=64, packed=64)


def row_limits(width: int, folder: Path = Path(CACHE_FOLDER)) -> RowLimits:
    """The limits for layers of `width` inputs on this machine, with the threads that numba has now. They are measured
    once, in about a second, and kept in `folder`, which is that of the kernels: others than these are measured anew.
    On a busy machine anything may come out, so then USUAL are taken, and the next start measures again.
    """
    file, threads = folder / _FILE, numba.get_num_threads()
    key = f"{get_host_cpu_name()}, {LANES} lanes, {threads} threads, torch {torch.__version__}, width {width}"
    known = _read(file)
    limits = known.get(key)
    how = "as measured before"
    if limits is None:
        linear(torch.zeros(1, width), torch.zeros(1, width), None)  # compiled now, by one thread, and not while timed
        begun = Clock.now()
        limits, how = measure(width), "measured now"
        if (had := processor_share(begun, threads)) < _QUIET:
            limits, how = USUAL, f"not measured: it had {had:.0%} of its processors; the next start tries again"
        else:
            _write(file, {**_read(file), key: limits})
    log.info(
        "linear layers: izh's kernel up to %s rows, beside packed weights up to %s (%s; %s)",
        *("any number of" if limit == ANY_ROWS else limit for limit in astuple(limits)), how, file,
    )  # fmt: skip
    return limits


class Clock(NamedTuple):
    """Seconds: of the wall, and of the processors for all threads of this process."""

    wall: float
    processors: float

    @classmethod
    def now(cls) -> "Clock":
        return cls(time.perf_counter(), time.process_time())


def processor_share(begun: Clock, threads: int) -> float:
    """Of the time that `threads` busy threads would have had since then, what the process got."""
    wall, processors = Clock.now()
    return (processors - begun.processors) / (wall - begun.wall) / threads


def measure(width: int) -> RowLimits:
    """What `row_limits` finds out, on random weights."""
    weights = [torch.randn(max(_FLOATS // width, 1), width) for _ in range(_WEIGHTS)]
    packed = [freeze_linear(weight, None) for weight in weights]

    def ours(x: Tensor) -> None:
        for weight in weights:
            linear(x, weight, None)

    def plain(x: Tensor) -> None:
        for weight in weights:
            F.linear(x, weight)

    def reordered(x: Tensor) -> None:
        for layer in packed:
            layer(x)

    def limit(other: Callable[[Tensor], None], more: float) -> int:
        times = [_times(ours, other, torch.randn(rows, width)) for rows in _ROWS]
        return best_limit([(mine, its + _WEIGHTS * more) for mine, its in times])

    return RowLimits(plain=limit(plain, 0.0), packed=limit(reordered, _APART_S))


def best_limit(times: Sequence[tuple[float, float]]) -> int:
    """The limit that loses least, of the times that our kernel and the other take for each number of `_ROWS`: by how
    much it is slower than the faster of the two, summed up, so that one disturbed reading decides nothing."""

    def loss(below: int) -> float:
        """Of our kernel for the first `below` numbers of rows and the other for the rest."""
        chosen = (mine if index < below else its for index, (mine, its) in enumerate(times))
        return sum(time / min(both) for time, both in zip(chosen, times, strict=True))

    best = min(range(len(times), -1, -1), key=loss)
    return (0, *_ROWS[:-1], ANY_ROWS)[best]


@torch.inference_mode()
def _times(ours: Callable[[Tensor], None], other: Callable[[Tensor], None], x: Tensor) -> tuple[float, float]:
    """Seconds that each takes, the shortest of several runs in turn."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(_REPEATS):
        for run, times in zip((ours, other), taken, strict=True):
            start = time.perf_counter()
            run(x)
            times.append(time.perf_counter() - start)
    return min(taken[0]), min(taken[1])


def _read(file: Path) -> dict[str, RowLimits]:
    """What was measured before; nothing if there is no file, or one that is not ours."""
    try:
        return {key: RowLimits(*map(int, limits)) for key, limits in json.loads(file.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(file: Path, known: dict[str, RowLimits]) -> None:
    """Keep it, whole or not at all; where nothing can be written it is measured again at the next start."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as scratch:
            json.dump({key: astuple(limits) for key, limits in known.items()}, scratch, indent=1)
        os.replace(scratch.name, file)
    except OSError as error:
        log.warning("%s: cannot be written: %s", file, error)
