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
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

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
_FILE = "row-limits.json"


@dataclass(frozen=True)
class RowLimits:
    """Rows up to which izh's kernel is used: where the weight lies once, as in the checkpoint, and where the vendor's
    product has it in an order of its own. 0 for none, ANY_ROWS for all."""

    plain: int
    packed: int


def row_limits(width: int, folder: Path = Path(CACHE_FOLDER)) -> RowLimits:
    """The limits for layers of `width` inputs on this machine, with the threads that numba has now. They are measured
    once, in about a second, and kept in `folder`, which is that of the kernels: others than these are measured anew.
    """
    file, threads = folder / _FILE, numba.get_num_threads()
    key = f"{get_host_cpu_name()}, {LANES} lanes, {threads} threads, torch {torch.__version__}, width {width}"
    known = _read(file)
    limits = known.get(key)
    if limits is None:
        limits = measure(width)
        _write(file, {**_read(file), key: limits})
    how = "measured now" if key not in known else "as measured before"
    log.info(
        "linear layers: izh's kernel up to %s rows, beside packed weights up to %s (%s; %s)",
        *("any number of" if limit == ANY_ROWS else limit for limit in astuple(limits)), how, file,
    )  # fmt: skip
    return limits


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

    def limit(other: Callable[[Tensor], None]) -> int:
        return last_lead(lambda rows: _leads(ours, other, torch.randn(rows, width)))

    return RowLimits(plain=limit(plain), packed=limit(reordered))


def last_lead(leads: Callable[[int], bool]) -> int:
    """The most rows up to which our kernel always leads, by what `leads` says of each number of `_ROWS`."""
    last = 0
    for rows in _ROWS:
        if not leads(rows):
            return last
        last = rows
    return ANY_ROWS


@torch.inference_mode()
def _leads(ours: Callable[[Tensor], None], other: Callable[[Tensor], None], x: Tensor) -> bool:
    """Whether our kernel takes no longer than the other. They run in turn; the shortest time of each counts."""
    times: dict[Callable[[Tensor], None], list[float]] = {ours: [], other: []}
    for _ in range(_REPEATS):
        for run, taken in times.items():
            start = time.perf_counter()
            run(x)
            taken.append(time.perf_counter() - start)
    return min(times[ours]) <= min(times[other])


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
