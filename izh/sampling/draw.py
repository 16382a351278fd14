"""From logits to a sampled token: temperature, min-p, top-k, top-p, then the inverse CDF.

Owns: Filters (a batch's parameters as tensors) and the draw itself.
Must not know: sequences, penalties, random streams (each row brings its own uniform number).
Invariant: a row's token depends on that row's logits, parameters and number alone.

Each filter keeps the tokens whose scaled logit is at least some floor, so that the floors of one row add up to one
number. Order, as in vLLM: temperature, min-p (relative to the largest probability), top-k, top-p (of what is left,
renormalized). Tokens exactly as likely as the last one kept are kept too.

Three ways, from fast to slow; which one a row takes depends on the row alone:
  unfiltered   inverse CDF over the whole row
  narrow       all that is kept lies among the row's `NUM_CANDIDATES` best: only these are looked at
  wide         the row is sorted to find its floor, then as unfiltered
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from izh.request import SamplingParams
from izh.sampling.blocks import mass, pick, pick_short, top_candidates

NUM_CANDIDATES = 128
_WIDE_ROWS = 8  # rows sorted at a time, which bounds the memory that sorting takes


@dataclass(frozen=True, slots=True)
class Filters:
    """The parameters of R rows. [R] each: a filter that is off has top_k = V, top_p = 1, min_logit = -inf."""

    temperature: Tensor  # float32
    min_logit: Tensor  # float32: log(min_p), the least scaled logit relative to the row's largest
    top_k: Tensor  # int64
    top_p: Tensor  # float64

    @staticmethod
    def of(params: Many[SamplingParams], vocab_size: int, device: torch.device) -> "Filters":
        with np.errstate(divide="ignore"):
            min_logit = np.log(np.array([each.min_p for each in params], np.float64)).astype(np.float32)
        top_k = [min(each.top_k or vocab_size, vocab_size) for each in params]
        return Filters(
            temperature=torch.tensor([each.temperature for each in params], dtype=torch.float32, device=device),
            min_logit=torch.from_numpy(min_logit).to(device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            top_p=torch.tensor([each.top_p for each in params], dtype=torch.float64, device=device),
        )

    def __getitem__(self, rows: Tensor | slice) -> "Filters":
        return Filters(self.temperature[rows], self.min_logit[rows], self.top_k[rows], self.top_p[rows])


def scale(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """(logits - peak) / temperature: the largest becomes 0. Modifies `logits` [R, V]."""
    return logits.sub_(peak[:, None]).div_(temperature[:, None])


def draw_unfiltered(scaled: Tensor, uniform: Tensor) -> Tensor:
    """[R] int64 tokens from softmax(scaled). Modifies `scaled` [R, V]; `uniform` [R] float64."""
    return pick(scaled.exp_(), uniform)


def draw_filtered(scaled: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    """[R] int64 tokens from softmax(scaled) after min-p, top-k and top-p. `scaled` [R, V], each row's largest 0."""
    tokens, found = _draw_narrow(scaled, filters, uniform)
    rest = (~found).nonzero()[:, 0]
    for first in range(0, len(rest), _WIDE_ROWS):
        some = rest[first : first + _WIDE_ROWS]
        tokens[some] = _draw_wide(scaled[some], filters[some], uniform[some])
    return tokens


def _draw_narrow(scaled: Tensor, filters: Filters, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens [R], found [R] bool): a token for each row whose candidates provably hold all that is kept."""
    vocab_size = scaled.shape[1]
    values, columns = top_candidates(scaled, NUM_CANDIDATES)
    count = values.shape[1]
    least = values[:, -1]

    kth = values.gather(1, filters.top_k.clamp(max=count)[:, None] - 1)[:, 0]
    floor = torch.maximum(filters.min_logit, kth.where(filters.top_k <= count, -torch.inf))
    closed = (least < floor) | least.isneginf() | (count == vocab_size)

    weights = values.exp().where(values >= floor[:, None], 0.0).double()
    ends = weights.cumsum(1)
    total = ends[:, -1]
    # Top-p alone: the candidates may hold enough of the row's mass even though more than they are kept before it.
    only_top_p = ~closed & (filters.top_k == vocab_size) & filters.min_logit.isneginf()
    rows = only_top_p.nonzero()[:, 0]
    if len(rows):
        whole = scaled if len(rows) == len(scaled) else scaled[rows]
        total = total.index_copy(0, rows, mass(whole.exp()))
    edge = torch.searchsorted(ends, (filters.top_p * total)[:, None])[:, 0]
    cut = (filters.top_p < 1.0) & (edge < count) & (closed | only_top_p)
    last_kept = values.gather(1, edge.clamp(max=count - 1)[:, None])[:, 0]
    floor = torch.maximum(floor, last_kept.where(cut, -torch.inf))
    found = closed | (cut & (least < floor))

    columns, by_column = columns.sort(dim=1)
    weights = weights.where(values >= floor[:, None], 0.0).gather(1, by_column)
    place = pick_short(weights, uniform)
    return columns.gather(1, place[:, None])[:, 0], found


def _draw_wide(scaled: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    """[R] int64 tokens, for any row. The last token kept is where the mass summed from the least likely one upwards
    first exceeds 1 - top_p: the inverse CDF of the sorted row."""
    values = _ascending(scaled)
    kth = values.gather(1, scaled.shape[1] - filters.top_k[:, None])
    floor = torch.maximum(filters.min_logit[:, None], kth)
    weights = values.exp()
    if (floor > values[:, :1]).any():
        weights.masked_fill_(values < floor, 0.0)
    last_kept = pick(weights, 1.0 - filters.top_p)
    floor = values.gather(1, last_kept[:, None])
    return pick(scaled.exp().masked_fill_(scaled < floor, 0.0), uniform)


def _ascending(x: Tensor) -> Tensor:
    """Each row's values, sorted. On a CPU numpy's sort is vectorized and an order faster than torch's, which also sorts
    the indices."""
    return torch.from_numpy(np.sort(x.numpy(), axis=1)) if x.is_cpu else x.sort(dim=1).values
