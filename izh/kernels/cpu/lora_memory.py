"""The memory that the kernels of low-rank corrections are given by address, as arrays.

Owns: how long each array is.
Must not know: arithmetic, tensors. What the addresses lead to was checked by `lora.py`.
"""

from typing import Any

from numba import carray

from izh.kernels.cpu.compile import float32_at, int32_at, kernel, uint16_at


@kernel()
def weights_at(
    a_address: int, b_address: int, num_slots: int, parts: int, max_rank: int, width: int, b_row: int
) -> tuple[Any, Any, Any, Any]:
    """a [S, P, R, K] and b [S, R, b_row], flat, as float32 and then as the bits of float16: they are one of the two."""
    a_size, b_size = num_slots * parts * max_rank * width, num_slots * max_rank * b_row
    return (
        carray(float32_at(a_address), a_size),
        carray(float32_at(b_address), b_size),
        carray(uint16_at(a_address), a_size),
        carray(uint16_at(b_address), b_size),
    )


@kernel()
def groups_at(
    offsets_address: int, ranks_address: int, order_address: int, starts_address: int, slots_address: int,
    num_slots: int, parts: int, num_order: int, num_groups: int,
) -> tuple[Any, Any, Any, Any, Any]:  # fmt: skip
    """(offsets, ranks, order, starts, slots) as `Ops.add_lora` and `AdapterRows` have them."""
    return (
        carray(int32_at(offsets_address), parts + 1),
        carray(int32_at(ranks_address), (num_slots, parts)),
        carray(int32_at(order_address), num_order),
        carray(int32_at(starts_address), num_groups + 1),
        carray(int32_at(slots_address), num_groups),
    )
