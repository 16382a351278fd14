"""Low-rank corrections in Triton: the op `add_lora`, and its two paths by the names the field knows, `bgmv` and `sgmv`.

Owns: which path a step takes, the cutting of its work into programs, ranks on the device.
Must not know: adapters' names, modules. Which rows take which slot is `AdapterRows` (or `slots` in `bgmv`).
Invariant: nothing is launched for a projection that no adapter in the step changes, and no call waits for the device
except the first after a change of ranks, which copies them.

N, T = rows, S = slots, P = parts of a fused projection, R = highest rank, K -> D widths. With TRITON_INTERPRET=1 in the
environment before the first import the kernels run on CPU tensors.
Sources: Chen et al. 2023, arXiv 2310.18547 (BGMV and SGMV); Sheng et al. 2023, arXiv 2311.03285 (ranks of every size).
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from izh.kernels.lora import AdapterRows
from izh.kernels.triton.lora_kernels import expand_rows, expand_tiles, shrink_rows, shrink_tiles, triton

IS_INTERPRETED = not isinstance(shrink_rows, triton.JITFunction)  # so the kernels take CPU tensors

# The sizes below follow from how the kernels load and from tensor cores' least tiles (16); no GPU has tuned them.
FEW = 4  # rows of one slot up to which each multiplies alone: a tile would be three quarters empty
SPAN, MOST_SPLITS = 512, 8  # inputs per program of the first product, so that few rows still occupy many programs


def add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, offsets: tuple[int, ...], ranks: Tensor, rows: AdapterRows
) -> None:
    """See `Ops.add_lora`. All tensors but `ranks` are on one device; x, y, a and b may be views whose last dimension is
    contiguous.

    Up to FEW rows per slot a row's numbers do not depend on what else is in the step.

    Modifies: y. Raises: ValueError naming the argument whose shape, layout, place or content does not fit.
    """
    num_slots, num_parts, max_rank, _ = a.shape
    num_rows, outputs = x.shape[0], b.shape[1]
    _check(x, a, b)
    if y.shape != (num_rows, outputs) or (outputs > 1 and y.stride(1) != 1):
        raise ValueError(f"y: {tuple(y.shape)}, strides {y.stride()}; x and b need rows {(num_rows, outputs)}")
    if len(offsets) != num_parts + 1 or (offsets[0], offsets[-1]) != (0, outputs) or list(offsets) != sorted(offsets):
        raise ValueError(f"offsets: {offsets} do not cut {outputs} outputs into {num_parts} parts")
    if rows.order.device != x.device or y.device != x.device:
        raise ValueError(f"rows: on {rows.order.device}, y on {y.device}, but x on {x.device}")
    if rows.groups[-1][0] >= num_slots or len(rows.order) > num_rows:
        raise ValueError(f"rows: {len(rows.order)} up to slot {rows.groups[-1][0]}, of {num_rows} and {num_slots}")
    known = _ranks(ranks, (num_slots, num_parts), max_rank, x.device)
    if not any(any(known.host[slot]) for slot, _, _ in rows.groups):
        return
    if rows.longest <= FEW:
        _by_rows(y, x, a, b, offsets, known.device, rows.order, rows.slot_of_row)
    else:
        _by_tiles(y, x, a, b, offsets, known.device, rows)


def bgmv(x: Tensor, a: Tensor, b: Tensor, slots: Tensor, ranks: Tensor | None = None) -> Tensor:
    """`grouped_lora` for few rows per slot: x [N, K], a [S, R, K], b [S, D, R], slots [N] int64 -> [N, D].

    `ranks` [S] int32 are the slots' real ranks, on x's device; None means R for all. a and b are contiguous in their
    last dimension. Raises: ValueError naming the argument whose shape or layout does not fit.
    """
    ranks = _check_one_part(x, a, b, ranks)
    if slots.shape != (x.shape[0],):
        raise ValueError(f"slots: shape {tuple(slots.shape)} for {x.shape[0]} rows of x")
    y = x.new_zeros(x.shape[0], b.shape[1])
    if len(x):
        order = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        _by_rows(y, x, a[:, None], b, (0, b.shape[1]), ranks, order, slots)
    return y


def sgmv(x: Tensor, a: Tensor, b: Tensor, rows: AdapterRows | None, ranks: Tensor | None = None) -> Tensor:
    """`grouped_lora` for many rows per slot, grouped beforehand: `rows` as `AdapterRows.of` makes it.

    Shapes and `ranks` as in `bgmv`. Raises: ValueError naming the argument whose shape or layout does not fit.
    """
    ranks = _check_one_part(x, a, b, ranks)
    y = x.new_zeros(x.shape[0], b.shape[1])
    if rows is not None:
        _by_tiles(y, x, a[:, None], b, (0, b.shape[1]), ranks, rows)
    return y


def _by_rows(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, offsets: tuple[int, ...], ranks: Tensor, order: Tensor, slots: Tensor
) -> None:
    """Row order[i] takes slot slots[i]: each weight is read once per row, from memory or a cache."""
    _, num_parts, max_rank, width = a.shape
    block_r = 16
    block_k = _power(width, 256)
    span, num_splits = _spans(width, block_k)
    low = x.new_empty(len(order), num_splits, num_parts, max_rank, dtype=torch.float32)
    shrink_rows[(len(order), num_parts * triton.cdiv(max_rank, block_r), num_splits)](
        x, a, order, slots, ranks, low, width, num_parts, max_rank, span, x.stride(0), *a.stride()[:3],
        NUM_SPLITS=num_splits, BLOCK_R=block_r, BLOCK_K=block_k,
    )  # fmt: skip
    block_d = _power(y.shape[1], 128)
    blocks = _blocks(offsets, block_d, x.device)
    expand_rows[(len(order), len(blocks))](
        low, b, order, slots, ranks, blocks, y, num_parts, max_rank, *b.stride()[:2], y.stride(0),
        NUM_SPLITS=num_splits, BLOCK_D=block_d, BLOCK_R=block_r,
    )  # fmt: skip


def _by_tiles(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, offsets: tuple[int, ...], ranks: Tensor, rows: AdapterRows
) -> None:
    """Each weight is read once per tile of rows of its slot."""
    _, num_parts, max_rank, width = a.shape
    is_long = rows.tile_rows > 16
    # Long prompts are bound by reading x and y, so there a block takes all of a usual rank to read x once; the tensor
    # cores' lanes beyond a real rank would idle anyway.
    block_r = _power(max_rank, 64) if is_long else 16
    block_k = _power(width, 128)
    span, num_splits = (width, 1) if is_long else _spans(width, block_k)
    low = x.new_empty(len(rows.order), num_splits, num_parts, max_rank, dtype=torch.float32)
    shrink_tiles[(len(rows.tiles), num_parts * triton.cdiv(max_rank, block_r), num_splits)](
        x, a, rows.order, rows.tiles, ranks, low, width, num_parts, max_rank, span, x.stride(0), *a.stride()[:3],
        NUM_SPLITS=num_splits, BLOCK_N=rows.tile_rows, BLOCK_R=block_r, BLOCK_K=block_k, PRECISION="ieee",
    )  # fmt: skip
    block_d = _power(y.shape[1], 128)
    blocks = _blocks(offsets, block_d, x.device)
    expand_tiles[(len(rows.tiles), len(blocks))](
        low, b, rows.order, rows.tiles, ranks, blocks, y, num_parts, max_rank, *b.stride()[:2], y.stride(0),
        NUM_SPLITS=num_splits, BLOCK_N=rows.tile_rows, BLOCK_D=block_d, BLOCK_R=block_r,
        # low is float32 whatever the weights are. Half-precision weights are exact in TF32, which has tensor cores.
        PRECISION="ieee" if b.dtype == torch.float32 else "tf32",
    )  # fmt: skip


def _power(size: int, most: int) -> int:
    """A power of two of 16, which is the least that tl.dot takes, to `most`, that covers `size` if one does."""
    return min(most, max(16, triton.next_power_of_2(size)))


def _spans(width: int, block_k: int) -> tuple[int, int]:
    """Inputs per program, a multiple of its step, and the number of programs that cover `width`. A function of the
    width alone, so that the batch does not change the order of a sum."""
    wanted = min(MOST_SPLITS, triton.cdiv(width, SPAN))
    span = triton.cdiv(triton.cdiv(width, wanted), block_k) * block_k
    return span, triton.cdiv(width, span)


@lru_cache(maxsize=256)
def _blocks(offsets: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """[M, 3] int32: (part, first output, end of the part) of blocks of outputs that no part's border crosses."""
    parts = enumerate(pairwise(offsets))
    blocks = [(part, at, stop) for part, (start, stop) in parts for at in range(start, stop, size)]
    return torch.tensor(blocks, dtype=torch.int32).to(device)


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The op's `ranks`, as they were at `version` of their tensor."""

    version: int | None  # None: a tensor made in inference mode, which does not count its changes
    host: list[list[int]]
    device: Tensor


_seen = WeakTensorKeyDictionary()  # each projection's ranks tensor -> its _Ranks


def _ranks(ranks: Tensor, shape: tuple[int, int], max_rank: int, device: torch.device) -> _Ranks:
    """Ranks on the host and on the device, copied when they have changed. Raises ValueError when they do not fit."""
    version = None if ranks.is_inference() else ranks._version
    known: _Ranks | None = _seen.get(ranks)
    if known is not None and version is not None and known.version == version and known.device.device == device:
        return known
    if ranks.shape != shape or ranks.dtype != torch.int32 or ranks.device.type != "cpu":
        raise ValueError(
            f"ranks: {ranks.dtype} {tuple(ranks.shape)} on {ranks.device}; they are int32 {shape} on the host"
        )
    host = ranks.tolist()
    for slot, row in enumerate(host):
        if not all(0 <= rank <= max_rank for rank in row):
            raise ValueError(f"ranks: {row} in slot {slot}, whose room is for 0 to {max_rank}")
    known = _Ranks(version, host, ranks.to(device, copy=True))
    _seen[ranks] = known
    return known


def _check(x: Tensor, a: Tensor, b: Tensor) -> None:
    """x [N, K], a [S, P, R, K], b [S, D, R]. Raises ValueError."""
    num_slots, _, max_rank, width = a.shape
    if width != x.shape[1]:
        raise ValueError(f"a: width {width} for rows of x {tuple(x.shape)}")
    if (b.shape[0], b.shape[2]) != (num_slots, max_rank):
        raise ValueError(f"b: shape {tuple(b.shape)} does not go with a {tuple(a.shape)}")
    for name, tensor in (("x", x), ("a", a), ("b", b)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: strides {tensor.stride()}; call .contiguous() first")


def _check_one_part(x: Tensor, a: Tensor, b: Tensor, ranks: Tensor | None) -> Tensor:
    """The ranks [S] int32, of `bgmv` and `sgmv`. Raises ValueError."""
    _check(x, a[:, None], b)
    num_slots, max_rank, _ = a.shape
    if ranks is None:
        return torch.full((num_slots,), max_rank, dtype=torch.int32, device=x.device)
    if ranks.shape != (num_slots,) or ranks.dtype != torch.int32:
        raise ValueError(
            f"ranks: {ranks.dtype} {tuple(ranks.shape)}; they are int32, one for each of {num_slots} slots"
        )
    return ranks
