"""The Triton kernels of low-rank corrections: low = A x, then y += B low, each for single rows and for tiles of rows.

Owns: `shrink_rows`, `expand_rows`, `shrink_tiles`, `expand_tiles`. Must not know: who launches them; `lora.py` does.
Invariant: sums run in float32, over real ranks and widths only: what lies beyond is not read. Each element of low and
of y belongs to one program, so no result depends on the order in which programs run.

x [T, K], a [S, P, R, K], b [S, D, R], y [T, D], ranks [S, P] int32; `order` [n] int32 are the rows with an adapter.
low [n, NUM_SPLITS, P, R] float32: long rows of x are cut into spans, whose sums the second product adds up in order.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "bgmv and sgmv need Triton, which is not installed here: pip install 'izh[gpu]', or use "
        "izh.kernels.grouped_lora, the same in plain PyTorch"
    ) from error


@triton.jit
def shrink_rows(  # type: ignore[no-untyped-def]  # Triton reads annotations as its own types
    x, a, order, slots, ranks, low, num_inputs, num_parts, max_rank, span, x_row, a_slot, a_part, a_rank,
    NUM_SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per row, block of a part's ranks, and span of inputs."""
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + index).to(tl.int64)
    if slot < 0:
        return
    rank_blocks = tl.cdiv(max_rank, BLOCK_R)
    part, first = tl.program_id(1) // rank_blocks, tl.program_id(1) % rank_blocks * BLOCK_R
    rank = tl.load(ranks + slot * num_parts + part)
    if first >= rank:
        return
    r = first + tl.arange(0, BLOCK_R)
    row = tl.load(order + index).to(tl.int64)
    split = tl.program_id(2)
    sums = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for start in range(split * span, tl.minimum((split + 1) * span, num_inputs), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        values = tl.load(x + row * x_row + k, mask=k < num_inputs, other=0.0).to(tl.float32)
        inside = (r[:, None] < rank) & (k[None, :] < num_inputs)
        weights = tl.load(a + slot * a_slot + part * a_part + r[:, None] * a_rank + k[None, :], mask=inside, other=0.0)
        sums += tl.sum(weights.to(tl.float32) * values[None, :], axis=1)
    tl.store(low + ((index * NUM_SPLITS + split) * num_parts + part) * max_rank + r, sums, mask=r < rank)


@triton.jit
def expand_rows(  # type: ignore[no-untyped-def]  # Triton reads annotations as its own types
    low, b, order, slots, ranks, blocks, y, num_parts, max_rank, b_slot, b_row, y_row,
    NUM_SPLITS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program per row and block of outputs; `blocks` [M, 3] int32 are (part, first output, end)."""
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + index).to(tl.int64)
    if slot < 0:
        return
    block = blocks + tl.program_id(1) * 3
    part = tl.load(block)
    rank = tl.load(ranks + slot * num_parts + part)
    if rank <= 0:
        return
    d = tl.load(block + 1) + tl.arange(0, BLOCK_D)
    is_output = d < tl.load(block + 2)
    sums = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        values = tl.zeros((BLOCK_R,), dtype=tl.float32)
        for split in tl.static_range(NUM_SPLITS):
            low_at = low + ((index * NUM_SPLITS + split) * num_parts + part) * max_rank + r
            values += tl.load(low_at, mask=r < rank, other=0.0)
        inside = is_output[:, None] & (r[None, :] < rank)
        weights = tl.load(b + slot * b_slot + d[:, None] * b_row + r[None, :], mask=inside, other=0.0)
        sums += tl.sum(weights.to(tl.float32) * values[None, :], axis=1)
    y_at = y + tl.load(order + index).to(tl.int64) * y_row + d
    total = tl.load(y_at, mask=is_output, other=0.0).to(tl.float32) + sums
    tl.store(y_at, total.to(y.dtype.element_ty), mask=is_output)


@triton.jit
def shrink_tiles(  # type: ignore[no-untyped-def]  # Triton reads annotations as its own types
    x, a, order, tiles, ranks, low, num_inputs, num_parts, max_rank, span, x_row, a_slot, a_part, a_rank,
    NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`shrink_rows` for rows of one slot together; `tiles` [N, 3] int32 are (slot, start, stop) in `order`."""
    tile = tiles + tl.program_id(0) * 3
    slot = tl.load(tile).to(tl.int64)
    rank_blocks = tl.cdiv(max_rank, BLOCK_R)
    part, first = tl.program_id(1) // rank_blocks, tl.program_id(1) % rank_blocks * BLOCK_R
    rank = tl.load(ranks + slot * num_parts + part)
    if first >= rank:
        return
    r = first + tl.arange(0, BLOCK_R)
    index = tl.load(tile + 1) + tl.arange(0, BLOCK_N)
    has_row = index < tl.load(tile + 2)
    rows = tl.load(order + index, mask=has_row, other=0).to(tl.int64)
    split = tl.program_id(2)
    sums = tl.zeros((BLOCK_N, BLOCK_R), dtype=tl.float32)
    for start in range(split * span, tl.minimum((split + 1) * span, num_inputs), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_input = k < num_inputs
        values = tl.load(x + rows[:, None] * x_row + k[None, :], mask=has_row[:, None] & is_input[None, :], other=0.0)
        inside = is_input[:, None] & (r[None, :] < rank)
        weights = tl.load(a + slot * a_slot + part * a_part + r[None, :] * a_rank + k[:, None], mask=inside, other=0.0)
        sums = tl.dot(values, weights.to(values.dtype), sums, input_precision=PRECISION)
    low_row = (index.to(tl.int64) * NUM_SPLITS + split) * num_parts + part
    tl.store(low + low_row[:, None] * max_rank + r[None, :], sums, mask=has_row[:, None] & (r[None, :] < rank))


@triton.jit
def expand_tiles(  # type: ignore[no-untyped-def]  # Triton reads annotations as its own types
    low, b, order, tiles, ranks, blocks, y, num_parts, max_rank, b_slot, b_row, y_row,
    NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`expand_rows` for rows of one slot together."""
    tile = tiles + tl.program_id(0) * 3
    slot = tl.load(tile).to(tl.int64)
    block = blocks + tl.program_id(1) * 3
    part = tl.load(block)
    rank = tl.load(ranks + slot * num_parts + part)
    if rank <= 0:
        return
    d = tl.load(block + 1) + tl.arange(0, BLOCK_D)
    is_output = d < tl.load(block + 2)
    index = tl.load(tile + 1) + tl.arange(0, BLOCK_N)
    has_row = index < tl.load(tile + 2)
    sums = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        values = tl.zeros((BLOCK_N, BLOCK_R), dtype=tl.float32)
        for split in tl.static_range(NUM_SPLITS):
            low_row = (index.to(tl.int64) * NUM_SPLITS + split) * num_parts + part
            is_low = has_row[:, None] & (r[None, :] < rank)
            values += tl.load(low + low_row[:, None] * max_rank + r[None, :], mask=is_low, other=0.0)
        inside = (r[:, None] < rank) & is_output[None, :]
        weights = tl.load(b + slot * b_slot + d[None, :] * b_row + r[:, None], mask=inside, other=0.0)
        sums = tl.dot(values, weights.to(tl.float32), sums, input_precision=PRECISION)
    rows = tl.load(order + index, mask=has_row, other=0).to(tl.int64)
    inside = has_row[:, None] & is_output[None, :]
    y_at = y + rows[:, None] * y_row + d[None, :]
    total = tl.load(y_at, mask=inside, other=0.0).to(tl.float32) + sums
    tl.store(y_at, total.to(y.dtype.element_ty), mask=inside)
