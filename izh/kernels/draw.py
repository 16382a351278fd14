"""Drawing a token: which tokens of a row are kept, what each weighs, and `draw` (the op of that name, by definition).

Owns: Filters (a batch's parameters as tensors), `weigh`, `draw`.
Must not know: requests, random streams (each row brings its own uniform number); how the CPU's kernel finds the same
tokens without sorting (`cpu/draw.py`).
Invariant: a row's token depends on that row's logits, parameters and number alone, and is the same on every machine.

    x = (logit - peak) / temperature     the largest is 0
    w = round(e^x * scale)               a whole number; e^x by the float32 steps of `weigh`, none of them fused

Sums of w are exact, so no order of adding can move an edge: a row's weights add up to at most 2^53, below which float64
holds every whole number. Order of filters, as in vLLM: min-p (relative to the largest probability), top-k, top-p (of
what is left). Each keeps the tokens with x at least some floor, so tokens exactly as likely as the last one kept are
kept too:

    min-p   x >= log(min_p)
    top-k   x >= the k-th largest x
    top-p   x >= the least x such that all that is likelier weighs less than top_p of what min-p and top-k keep

The token is the first, by id, at which the weights summed up to it exceed uniform * (the sum of all that are kept).
R = rows, V = columns.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_X = -64.0  # e^x * scale rounds to 0 from about -28 on
LOG2_E = math.log2(math.e)
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # together ln 2; times a whole number below 2^15 the first is exact
TAYLOR = tuple(1 / math.factorial(n) for n in range(8))
_SORTED_ROWS = 16  # at a time, which bounds the memory that sorting takes


@dataclass(frozen=True, slots=True)
class Filters:
    """The parameters of R rows. [R] each: a filter that is off has top_k = V, top_p = 1, min_logit = -inf."""

    temperature: Tensor  # float32, above 0
    min_logit: Tensor  # float32: log(min_p), the least x
    top_k: Tensor  # int64, 1 .. V
    top_p: Tensor  # float64, above 0
    is_on: bool  # whether any row has a filter

    def __getitem__(self, rows: slice) -> "Filters":
        return Filters(self.temperature[rows], self.min_logit[rows], self.top_k[rows], self.top_p[rows], self.is_on)


def scale_of(num_columns: int) -> float:
    """What the likeliest token weighs: a power of two, as large as exact sums allow."""
    return 2.0 ** min(40, 53 - (num_columns - 1).bit_length())


def weigh(x: Tensor, scale: float) -> Tensor:
    """x [...] float32, at most 0 -> [...] float64 whole numbers: e^x * scale, to about 1e-7 of it; 0 for NaN.

    e^x = 2^n * e^r with |r| <= ln(2) / 2: the first is made of bits, the second a Taylor series.
    """
    x = x.where(x > LEAST_X, LEAST_X)
    n = (x * LOG2_E).round()
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    series = torch.full_like(r, TAYLOR[-1])
    for coefficient in reversed(TAYLOR[:-1]):
        series = series * r + coefficient
    power = ((n.int() + 127) << 23).view(torch.float32)
    return ((series * power).double() * scale).round()


def draw(logits: Tensor, peak: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    """The op of the same name in `ops.py`."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for first in range(0, len(logits), _SORTED_ROWS):
        some = slice(first, first + _SORTED_ROWS)
        tokens[some] = _draw(logits[some], peak[some], filters[some], uniform[some])
    return tokens


def _draw(logits: Tensor, peak: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    last, scale = logits.shape[1] - 1, scale_of(logits.shape[1])
    x = (logits - peak[:, None]) / filters.temperature[:, None]
    weights = weigh(x, scale)
    if filters.is_on:
        weights.masked_fill_(x < _floor(x, filters, scale), 0.0)
    ends = weights.cumsum(1)
    place = torch.searchsorted(ends, (uniform * ends[:, -1])[:, None], right=True)
    return place[:, 0].clamp_(max=last)  # a row that is not finite has no weight; any column will do


def _floor(x: Tensor, filters: Filters, scale: float) -> Tensor:
    """[R, 1]: the least x that is kept."""
    falling = x.sort(dim=1, descending=True).values
    floor = torch.maximum(filters.min_logit[:, None], falling.gather(1, filters.top_k[:, None] - 1))
    ends = weigh(falling, scale).masked_fill_(falling < floor, 0.0).cumsum(1)
    edge = torch.searchsorted(ends, filters.top_p[:, None] * ends[:, -1:])
    return torch.maximum(floor, falling.gather(1, edge.clamp_(max=x.shape[1] - 1)))
