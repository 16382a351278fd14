"""Low-rank corrections in Triton: `bgmv` for decode, `sgmv` for prompts.

Owns: the two kernels and their wrappers. Each kernel multiplies rows by their own slot's matrix; a correction is two of
these products, low = A x and y = B low.
Must not know: adapters' names, modules. Which rows take which slot is `slots` or `AdapterRows`.
Invariant: sums run in float32 (low is kept in it), over the slot's real rank only: what lies beyond is not read. A row
without an adapter gets exactly zero.

N = rows, S = slots, R = highest rank, K -> D widths. With TRITON_INTERPRET=1 in the environment before the first import
the kernels run on CPU tensors.
Sources: Chen et al. 2023, arXiv 2310.18547 (BGMV and SGMV); Sheng et al. 2023, arXiv 2311.03285 (ranks of every size).
"""

import torch
from torch import Tensor

from izh.kernels.lora import AdapterRows

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "bgmv and sgmv need Triton, which is not installed here: pip install 'izh[gpu]', or use "
        "izh.kernels.grouped_lora, the same in plain PyTorch"
    ) from error


@triton.jit
def bgmv_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations as its own types
    x, weights, slots, ranks, out, num_inputs, num_outputs, x_row, w_slot, w_row, out_row,
    HAS_RANKS: tl.constexpr, IS_SHRINK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[n, d] = weights[slots[n], d, :] . x[n, :]: one program per row and block of outputs."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    # The rank is the number of outputs of the first product, and of inputs of the second.
    if HAS_RANKS:
        if IS_SHRINK:
            num_outputs = tl.load(ranks + slot)
        else:
            num_inputs = tl.load(ranks + slot)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if tl.program_id(1) * BLOCK_D >= num_outputs:
        return
    sums = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        values = tl.load(x + row.to(tl.int64) * x_row + k, mask=k < num_inputs, other=0.0).to(tl.float32)
        inside = (d[:, None] < num_outputs) & (k[None, :] < num_inputs)
        tile = tl.load(weights + slot * w_slot + d[:, None] * w_row + k[None, :], mask=inside, other=0.0)
        sums += tl.sum(tile.to(tl.float32) * values[None, :], axis=1)
    tl.store(out + row.to(tl.int64) * out_row + d, sums.to(out.dtype.element_ty), mask=d < num_outputs)


@triton.jit
def sgmv_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations as its own types
    x, weights, tiles, order, ranks, out, num_inputs, num_outputs, x_row, w_slot, w_row, out_row,
    HAS_RANKS: tl.constexpr, IS_SHRINK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for rows sorted by slot: one program per tile of rows, all of one slot, and block of outputs."""
    tile_at = tiles + tl.program_id(0) * 3
    slot = tl.load(tile_at).to(tl.int64)
    if HAS_RANKS:
        if IS_SHRINK:
            num_outputs = tl.load(ranks + slot)
        else:
            num_inputs = tl.load(ranks + slot)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if tl.program_id(1) * BLOCK_D >= num_outputs:
        return
    n = tl.load(tile_at + 1) + tl.arange(0, BLOCK_N)
    has_row = n < tl.load(tile_at + 2)
    rows = tl.load(order + n, mask=has_row, other=0).to(tl.int64)
    sums = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_input = k < num_inputs
        values = tl.load(x + rows[:, None] * x_row + k[None, :], mask=has_row[:, None] & is_input[None, :], other=0.0)
        inside = is_input[:, None] & (d[None, :] < num_outputs)
        tile = tl.load(weights + slot * w_slot + d[None, :] * w_row + k[:, None], mask=inside, other=0.0)
        sums = tl.dot(values, tile.to(values.dtype), sums, input_precision=PRECISION)
    inside = has_row[:, None] & (d[None, :] < num_outputs)
    tl.store(out + rows[:, None] * out_row + d[None, :], sums.to(out.dtype.element_ty), mask=inside)


def bgmv(x: Tensor, a: Tensor, b: Tensor, slots: Tensor, ranks: Tensor | None = None) -> Tensor:
    """`grouped_lora` for few rows per slot: x [N, K], a [S, R, K], b [S, D, R], slots [N] int64 -> [N, D].

    `ranks` [S] int32 are the slots' real ranks; None means R for all. a and b are contiguous in their last dimension.
    Raises: ValueError naming the argument whose shape or layout does not fit.
    """
    num_rows = _check(x, a, b, ranks)
    if slots.shape != (num_rows,):
        raise ValueError(f"slots: shape {tuple(slots.shape)} for {num_rows} rows of x")
    y = x.new_zeros(num_rows, b.shape[1])
    low = torch.empty(num_rows, a.shape[1], dtype=torch.float32, device=x.device)
    for rows, weights, out, is_shrink in ((x, a, low, True), (low, b, y, False)):
        block_d, block_k = _blocks(weights, is_shrink)
        if num_rows:
            bgmv_kernel[(num_rows, triton.cdiv(weights.shape[1], block_d))](
                rows, weights, slots, ranks, out, weights.shape[2], weights.shape[1], rows.stride(0),
                weights.stride(0), weights.stride(1), out.stride(0), HAS_RANKS=ranks is not None, IS_SHRINK=is_shrink,
                BLOCK_D=block_d, BLOCK_K=block_k,
            )  # fmt: skip
    return y


def sgmv(x: Tensor, a: Tensor, b: Tensor, rows: AdapterRows | None, ranks: Tensor | None = None) -> Tensor:
    """`grouped_lora` for many rows per slot, grouped beforehand: `rows` as `AdapterRows.of` makes it.

    Shapes and `ranks` as in `bgmv`. Raises: ValueError naming the argument whose shape or layout does not fit.
    """
    num_rows = _check(x, a, b, ranks)
    y = x.new_zeros(num_rows, b.shape[1])
    if rows is None:
        return y
    low = torch.empty(num_rows, a.shape[1], dtype=torch.float32, device=x.device)
    # low is float32 whatever the weights are. Half-precision weights are exact in TF32, which has tensor cores.
    precision = "ieee" if b.dtype == torch.float32 else "tf32"
    for source, weights, out, is_shrink in ((x, a, low, True), (low, b, y, False)):
        block_d, block_k = _blocks(weights, is_shrink)
        sgmv_kernel[(len(rows.tiles), triton.cdiv(weights.shape[1], block_d))](
            source, weights, rows.tiles, rows.order, ranks, out, weights.shape[2], weights.shape[1], source.stride(0),
            weights.stride(0), weights.stride(1), out.stride(0), HAS_RANKS=ranks is not None, IS_SHRINK=is_shrink,
            BLOCK_N=rows.tile_rows, BLOCK_D=block_d, BLOCK_K=block_k, PRECISION=precision,
        )  # fmt: skip
    return y


def _blocks(weights: Tensor, is_shrink: bool) -> tuple[int, int]:
    """Outputs and inputs per step of a program: powers of two of at least 16, which is what tl.dot takes.

    The first product is narrow and long, so it takes all of a usual rank at once and goes far at each step; the second
    takes a usual rank in one step.
    """
    outputs, inputs = weights.shape[1:]
    most_outputs, most_inputs = (64, 128) if is_shrink else (128, 64)
    return (
        min(most_outputs, max(16, triton.next_power_of_2(outputs))),
        min(most_inputs, max(16, triton.next_power_of_2(inputs))),
    )


def _check(x: Tensor, a: Tensor, b: Tensor, ranks: Tensor | None) -> int:
    """The number of rows."""
    num_rows, width = x.shape
    num_slots, max_rank, a_width = a.shape
    if a_width != width:
        raise ValueError(f"a: width {a_width} for rows of x {tuple(x.shape)}")
    if (b.shape[0], b.shape[2]) != (num_slots, max_rank):
        raise ValueError(f"b: shape {tuple(b.shape)} does not go with a {tuple(a.shape)}")
    if ranks is not None and (ranks.shape != (num_slots,) or ranks.dtype != torch.int32):
        raise ValueError(
            f"ranks: {ranks.dtype} {tuple(ranks.shape)}; they are int32, one for each of {num_slots} slots"
        )
    for name, tensor in (("x", x), ("a", a), ("b", b)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: strides {tensor.stride()}; call .contiguous() first")
    return num_rows
