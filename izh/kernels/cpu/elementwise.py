"""The ops around the matrix products on CPU: norms, rotary embedding, gated activations, writing KV pages.

Must not know: models, pages beyond their layout.
Invariant: a row's numbers do not depend on how many rows there are or which thread takes it. Rows may be strided views;
weights and results are contiguous.

All are numba, because all measured faster than torch. Microseconds, numba / torch, best of 60 short runs on 2 cores of
a Zen 5, width 576 (gates 2 x 1536, 9 + 3 heads of 64); torch is F.rms_norm, F.silu, F.gelu, and mul/addcmul/indexing:
             T = 1       T = 32       T = 2048
rms_norm     3.1 / 7.5   4.1 / 10     56 / 169
add_rms_norm 3.5 / 8.3   5.2 / 12     81 / 215
rope         2.2 / 22    4.6 / 37     85 / 599
write_kv     2.6 / 9.1   3.9 / 25     106 / 682
silu_mul     2.4 / 4.4   10 / 17      322 / 516
gelu_tanh_mul 2.5 / 5.8  11 / 40      377 / 2097
"""

import math
from typing import Any

import llvmlite.ir as ir
import numba
import numpy as np
import torch
from numba import carray, prange, types
from numba.extending import intrinsic
from torch import Tensor

from izh.kernels.cpu.check import check
from izh.kernels.cpu.compile import float32_at, int64_at, kernel, share
from izh.kernels.cpu.exp2 import exp2_lanes
from izh.kernels.cpu.simd import LANES, VectorCode

_SUM = {"nnan", "nsz", "reassoc", "contract"}
_LOG2_E = math.log2(math.e)
_GELU_SCALE = 2.0 * math.sqrt(2.0 / math.pi) * math.log2(math.e)
_GELU_CUBIC = 0.044715
_LARGEST_EXPONENT = 126.0  # of two, that is finite with what `exp2_lanes` multiplies it by
PARALLEL_FLOATS = 32768  # below this, starting threads costs more than the work: about 10 us on one core


def _threads(floats: int) -> int:
    return 1 if floats < PARALLEL_FLOATS else numba.get_num_threads()


@kernel(fastmath=_SUM)
def _norm_rows(
    start: int, stop: int, inner: int, x: Any, outer_stride: int, inner_stride: int, residual: Any,
    residual_stride: int, weight: Any, eps: float, out: Any,
) -> None:  # fmt: skip
    """Rows [start, stop), `inner` of them to each outer one; a residual of size 0 is none, else the sum goes there."""
    width = weight.size
    for row in range(start, stop):
        at = row // inner * outer_stride + row % inner * inner_stride
        source = x[at : at + width]  # slices, because an index that starts at 0 is one that can be vectorized
        to = out[row * width : (row + 1) * width]
        if residual.size:
            total = residual[row * residual_stride : row * residual_stride + width]
            for i in range(width):
                total[i] += source[i]
            source = total
        squares = np.float32(0.0)
        for i in range(width):
            squares += source[i] * source[i]
        factor = np.float32(1.0) / np.sqrt(squares / np.float32(width) + np.float32(eps))
        for i in range(width):
            to[i] = source[i] * factor * weight[i]


@kernel(parallel=True)
def norm_kernel(
    x_address: int, rows: int, inner: int, outer_stride: int, inner_stride: int, residual_address: int,
    residual_stride: int, weight_address: int, width: int, eps: float, out_address: int, threads: int,
) -> None:  # fmt: skip
    x = carray(float32_at(x_address), rows // inner * outer_stride + width)
    residual = carray(float32_at(residual_address), (rows * residual_stride + width) if residual_stride else 0)
    weight = carray(float32_at(weight_address), width)
    out = carray(float32_at(out_address), rows * width)
    if threads == 1:
        _norm_rows(np.int64(0), rows, inner, x, outer_stride, inner_stride, residual, residual_stride, weight, eps, out)
    else:
        for t in prange(threads):
            _norm_rows(
                share(rows, t, threads), share(rows, t + 1, threads), inner, x, outer_stride, inner_stride, residual,
                residual_stride, weight, eps, out,
            )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Ops.rms_norm`; x of one to three dimensions.  Raises: ValueError naming the argument."""
    shape = x.shape
    check("x", x, torch.float32, len(shape))
    (width,) = check("weight", weight, torch.float32, 1, contiguous=True)
    if not shape or width != shape[-1]:
        raise ValueError(f"weight: {width} entries for rows of x {tuple(shape)}")
    dims = len(shape)
    if dims == 2:
        rows, inner, outer_stride, inner_stride = shape[0], 1, x.stride(0), 0
    elif dims == 3:
        inner = shape[1]
        rows = shape[0] * inner
        outer_stride, inner_stride, _ = x.stride()
    elif dims == 1:
        rows, inner, outer_stride, inner_stride = 1, 1, width, 0
    else:
        raise ValueError(f"x: {dims} dimensions; rms_norm takes one to three")
    out = torch.empty(shape)
    norm_kernel(
        x.data_ptr(), rows, inner, outer_stride, inner_stride, 0, 0, weight.data_ptr(), width, float(eps),
        out.data_ptr(), _threads(rows * width),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `Ops.add_rms_norm`; works in place on `residual`.  Raises: ValueError naming the argument."""
    shape = check("x", x, torch.float32, 2)
    rows, width = shape
    if check("residual", residual, torch.float32, 2) != shape:
        raise ValueError(f"residual: shape {tuple(residual.shape)} differs from x {tuple(shape)}")
    if check("weight", weight, torch.float32, 1, contiguous=True)[0] != width:
        raise ValueError(f"weight: {weight.shape[0]} entries for rows of x {tuple(shape)}")
    out = torch.empty(rows, width)
    norm_kernel(
        x.data_ptr(), rows, 1, x.stride(0), 0, residual.data_ptr(), residual.stride(0), weight.data_ptr(), width,
        float(eps), out.data_ptr(), _threads(rows * width),
    )  # fmt: skip
    return out, residual


@kernel()
def _rotate_rows(
    start: int, stop: int, x: Any, heads: int, row_stride: int, head_stride: int, cos: Any, sin: Any, half: int
) -> None:
    for row in range(start, stop):
        c, s = cos[row * half : (row + 1) * half], sin[row * half : (row + 1) * half]
        for head in range(heads):
            at = row * row_stride + head * head_stride
            first, second = x[at : at + half], x[at + half : at + 2 * half]
            for i in range(half):
                a, b = first[i], second[i]
                first[i] = a * c[i] - b * s[i]
                second[i] = b * c[i] + a * s[i]


@kernel(parallel=True)
def rope_kernel(
    q_address: int, q_heads: int, q_row: int, q_head: int, k_address: int, k_heads: int, k_row: int, k_head: int,
    rows: int, width: int, cos_address: int, sin_address: int, half: int, threads: int,
) -> None:  # fmt: skip
    q = carray(float32_at(q_address), rows * q_row + q_heads * q_head + width)
    k = carray(float32_at(k_address), rows * k_row + k_heads * k_head + width)
    cos, sin = carray(float32_at(cos_address), rows * half), carray(float32_at(sin_address), rows * half)
    if threads == 1:
        _rotate_rows(np.int64(0), rows, q, q_heads, q_row, q_head, cos, sin, half)
        _rotate_rows(np.int64(0), rows, k, k_heads, k_row, k_head, cos, sin, half)
    else:
        for t in prange(threads):
            start, stop = share(rows, t, threads), share(rows, t + 1, threads)
            _rotate_rows(start, stop, q, q_heads, q_row, q_head, cos, sin, half)
            _rotate_rows(start, stop, k, k_heads, k_row, k_head, cos, sin, half)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `Ops.rope`; works in place.  Raises: ValueError naming the argument."""
    rows, q_heads, width = check("q", q, torch.float32, 3)
    k_rows, k_heads, k_width = check("k", k, torch.float32, 3)
    if k_rows != rows or k_width != width:
        raise ValueError(f"k: shape {tuple(k.shape)} does not go with q {tuple(q.shape)}")
    shape = check("cos", cos, torch.float32, 2, contiguous=True)
    half = shape[1]
    if shape[0] != rows or 2 * half > width:
        raise ValueError(
            f"cos: shape {tuple(shape)} for {rows} rows of width {width}; need [{rows}, at most width / 2]"
        )
    if check("sin", sin, torch.float32, 2, contiguous=True) != shape:
        raise ValueError(f"sin: shape {tuple(sin.shape)} differs from cos {tuple(shape)}")
    q_row, q_head, _ = q.stride()
    k_row, k_head, _ = k.stride()
    rope_kernel(
        q.data_ptr(), q_heads, q_row, q_head, k.data_ptr(), k_heads, k_row, k_head, rows, width, cos.data_ptr(),
        sin.data_ptr(), half, _threads(rows * (q_heads + k_heads) * width),
    )  # fmt: skip
    return q, k


@kernel()
def _write_rows(
    start: int, stop: int, x: Any, row_stride: int, head_stride: int, heads: int, width: int, pages: Any, block: int,
    slots: Any,
) -> None:  # fmt: skip
    for row in range(start, stop):
        slot = slots[row]
        if slot < 0:
            continue
        for head in range(heads):
            to = ((slot // block * heads + head) * block + slot % block) * width
            at = row * row_stride + head * head_stride
            source, target = x[at : at + width], pages[to : to + width]
            for i in range(width):
                target[i] = source[i]


@kernel(parallel=True)
def write_kv_kernel(
    k_address: int, k_row: int, k_head: int, v_address: int, v_row: int, v_head: int, rows: int, heads: int, width: int,
    k_pages_address: int, v_pages_address: int, num_slots: int, block: int, slots_address: int, threads: int,
) -> int:  # fmt: skip
    """The first row whose slot does not exist, nothing written then; else -1."""
    k = carray(float32_at(k_address), rows * k_row + heads * k_head + width)
    v = carray(float32_at(v_address), rows * v_row + heads * v_head + width)
    floats = num_slots * heads * width
    k_pages, v_pages = carray(float32_at(k_pages_address), floats), carray(float32_at(v_pages_address), floats)
    slots = carray(int64_at(slots_address), rows)
    for row in range(rows):
        if slots[row] >= num_slots:
            return row
    if threads == 1:
        _write_rows(np.int64(0), rows, k, k_row, k_head, heads, width, k_pages, block, slots)
        _write_rows(np.int64(0), rows, v, v_row, v_head, heads, width, v_pages, block, slots)
    else:
        for t in prange(threads):
            start, stop = share(rows, t, threads), share(rows, t + 1, threads)
            _write_rows(start, stop, k, k_row, k_head, heads, width, k_pages, block, slots)
            _write_rows(start, stop, v, v_row, v_head, heads, width, v_pages, block, slots)
    return -1


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """See `Ops.write_kv`.  Raises: ValueError naming the argument, having written nothing."""
    shape = check("k", k, torch.float32, 3)
    rows, heads, width = shape
    if check("v", v, torch.float32, 3) != shape:
        raise ValueError(f"v: shape {tuple(v.shape)} differs from k {tuple(shape)}")
    pages = check("k_pages", k_pages, torch.float32, 4, contiguous=True)
    num_blocks, page_heads, block, page_width = pages
    if check("v_pages", v_pages, torch.float32, 4, contiguous=True) != pages:
        raise ValueError(f"v_pages: shape {tuple(v_pages.shape)} differs from k_pages {tuple(pages)}")
    if page_heads != heads or page_width != width:
        raise ValueError(f"k: shape {tuple(shape)} does not fit pages {tuple(pages)}")
    if check("slots", slots, torch.int64, 1, contiguous=True)[0] != rows:
        raise ValueError(f"slots: {slots.shape[0]} entries for {rows} rows of k")
    k_row, k_head, _ = k.stride()
    v_row, v_head, _ = v.stride()
    bad = write_kv_kernel(
        k.data_ptr(), k_row, k_head, v.data_ptr(), v_row, v_head, rows, heads, width, k_pages.data_ptr(),
        v_pages.data_ptr(), num_blocks * block, block, slots.data_ptr(), _threads(2 * rows * heads * width),
    )  # fmt: skip
    if bad >= 0:
        raise ValueError(f"slots: row {bad} has slot {int(slots[bad])}, but the pages hold {num_blocks * block}")


@intrinsic(prefer_literal=True)
def _gate_lanes(
    typing_context: Any, x: Any, gate_at: Any, up_at: Any, out: Any, out_at: Any, tanh: Any
) -> Any:  # fmt: skip
    """out[out_at + i] = silu(x[gate_at + i]) * x[up_at + i], or gelu_tanh if the literal `tanh` is 1, for i < LANES.

    silu(a) = a / (1 + e^-a), and gelu_tanh(a) = a / (1 + e^-2u) with u the argument of its tanh.
    """
    at = types.intp
    signature = types.void(x, at, at, out, at, tanh)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        data, first, second, o, to, _ = args
        code = VectorCode(context, builder)
        zero = first.type(0)
        a, up = (code.load(code.row(x, data, each, zero, 0), zero) for each in (first, second))

        def every(value: float) -> ir.Value:
            return ir.Constant(a.type, [float(np.float32(value))] * LANES)

        if tanh.literal_value:
            cubic = builder.fmul(builder.fmul(a, a), every(_GELU_CUBIC))
            exponent = builder.fmul(every(-_GELU_SCALE), code.multiply_add(cubic, a, a))
        else:
            exponent = builder.fmul(every(-_LOG2_E), a)
        limit = every(_LARGEST_EXPONENT)
        power = exp2_lanes(code, builder.select(builder.fcmp_ordered("<", exponent, limit), exponent, limit))
        gated = builder.fmul(builder.fdiv(a, builder.fadd(every(1.0), power)), up)
        code.store(gated, code.row(out, o, to, zero, 0), zero)
        return context.get_dummy_value()

    return signature, codegen


@kernel()
def gate_block(
    start: int, stop: int, x: Any, row_stride: int, up_at: int, width: int, tanh: bool, out: Any, out_at: int,
    out_stride: int,
) -> None:  # fmt: skip
    """Rows [start, stop) of x: `width` gates, and `up_at` behind them what goes through, whole vectors of both; to
    `out_at` and on."""
    for row in range(start, stop):
        gate, to = row * row_stride, out_at + row * out_stride
        for i in range(0, width, LANES):
            if tanh:
                _gate_lanes(x, gate + i, gate + up_at + i, out, to + i, 1)
            else:
                _gate_lanes(x, gate + i, gate + up_at + i, out, to + i, 0)


@kernel()
def _gate_rows(start: int, stop: int, x: Any, row_stride: int, width: int, tanh: bool, out: Any) -> None:
    """Rows [start, stop) of x, `width` gates and as many numbers that go through them. Columns that fill no vector are
    a vector's in a place of their own."""
    whole = width - width % LANES
    gate_block(start, stop, x, row_stride, width, whole, tanh, out, 0, width)
    some = width - whole
    last = np.zeros(3 * LANES, np.float32)
    for row in range(start, stop if some else start):
        at = row * row_stride + whole
        for i in range(some):
            last[i], last[LANES + i] = x[at + i], x[at + width + i]
        gate_block(0, 1, last, 0, LANES, LANES, tanh, last, 2 * LANES, 0)
        for i in range(some):
            out[row * width + whole + i] = last[2 * LANES + i]


@kernel(parallel=True)
def gate_kernel(
    x_address: int, rows: int, row_stride: int, width: int, tanh: bool, out_address: int, threads: int
) -> None:
    x = carray(float32_at(x_address), rows * row_stride + 2 * width)
    out = carray(float32_at(out_address), rows * width)
    if threads == 1:
        _gate_rows(np.int64(0), rows, x, row_stride, width, tanh, out)
    else:
        for t in prange(threads):
            _gate_rows(share(rows, t, threads), share(rows, t + 1, threads), x, row_stride, width, tanh, out)


def _gated(x: Tensor, tanh: bool) -> Tensor:
    rows, both = check("x", x, torch.float32, 2)
    if both % 2:
        raise ValueError(f"x: width {both} is odd; it holds gate and up side by side")
    out = torch.empty(rows, both // 2)
    gate_kernel(x.data_ptr(), rows, x.stride(0), both // 2, tanh, out.data_ptr(), _threads(4 * rows * both))
    return out


def silu_mul(x: Tensor) -> Tensor:
    """See `Ops.silu_mul`.  Raises: ValueError naming the argument."""
    return _gated(x, False)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """See `Ops.gelu_tanh_mul`.  Raises: ValueError naming the argument."""
    return _gated(x, True)
