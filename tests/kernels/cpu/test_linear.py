from typing import Any

import numba
import pytest
import torch
import torch.nn.functional as F

from izh.kernels.cpu import linear, simd
from izh.kernels.cpu.compile import kernel
from izh.kernels.cpu.threads import choose_layer

choose_layer()

LANES = simd.LANES
PANEL = linear.PANEL


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_right(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Within the rounding of a sum of K products, whatever their order; more than that is a wrong or missing term."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert out.dtype == torch.float32
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=2e-6 * max(1, x.shape[1]) ** 0.5)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("outputs", [1, 3, 4, 6, 97, 960])
@pytest.mark.parametrize("width", [1, LANES - 1, LANES, 5 * LANES + 3, 576, 1001])
def test_linear_of_every_number_of_rows(width: int, outputs: int, bias: bool) -> None:
    weight, added = random(outputs, width), random(outputs) if bias else None
    for rows in (0, *range(1, 10), 16, PANEL - 1, PANEL, PANEL + 1, 2 * PANEL + 1):
        x = random(rows, width)
        assert_right(linear.linear(x, weight, added), x, weight, added)


def test_beyond_its_rows_it_is_torchs() -> None:
    x, weight, bias = random(9, 40), random(13, 40), random(13)
    up_to_eight = linear.linear_up_to(8)
    assert torch.equal(up_to_eight(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(up_to_eight(x[:8], weight, bias), linear.linear(x[:8], weight, bias))


@pytest.mark.parametrize(
    ("features", "lanes"), [("", 8), ("+avx2,+fma", 8), ("+avx2,+avx512f,+avx512vl", 16), ("+avx512f,-avx512vl", 8)]
)
def test_vectors_are_as_wide_as_the_registers_that_are_compiled_for(features: str, lanes: int) -> None:
    assert simd.lanes_of(features) == lanes


@pytest.mark.parametrize("rows", [1, 5, 2 * PANEL])
def test_rows_of_x_and_of_the_weight_may_be_views_of_wider_ones(rows: int) -> None:
    x, weight = random(rows, 300)[:, 11:230], random(403, 256)[1::2, 30:249]
    assert_right(linear.linear(x, weight, None), x, weight, None)


@pytest.mark.parametrize(("width", "outputs"), [(576, 960), (1536, 576), (2 * linear.DEPTH + 21, 100), (77, 413)])
def test_a_row_is_bit_for_bit_the_same_among_any_rows_the_kernel_takes(width: int, outputs: int) -> None:
    x, weight, bias = random(3 * PANEL, width), random(outputs, width), random(outputs)
    whole = linear.linear(x, weight, bias)
    for rows in (*range(1, 9), *range(9, 3 * PANEL, 7)):
        assert torch.equal(linear.linear(x[:rows], weight, bias), whole[:rows])
        assert torch.equal(linear.linear(x[-rows:], weight, bias), whole[-rows:])


def test_a_row_is_bit_for_bit_the_same_on_any_number_of_threads() -> None:
    x, weight = random(7, 576), random(963, 576)
    whole = linear.linear(x, weight, None)
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        assert torch.equal(linear.linear(x, weight, None), whole)
    finally:
        numba.set_num_threads(before)


def test_a_row_that_is_not_a_number_stays_alone() -> None:
    x, weight = random(4, 64), random(40, 64)
    whole = linear.linear(x, weight, None)
    x[2] = float("nan")
    out = linear.linear(x, weight, None)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3]], whole[[0, 1, 3]])


def test_nothing_is_written_outside_the_result() -> None:
    x, weight, around = random(3, 20), random(9, 20), torch.full((5, 9), 7.0)
    linear._linear(
        x.data_ptr(), 3, 20, weight.data_ptr(), 20, 9, 20, 0, 0, around[1:].data_ptr(), numba.get_num_threads()
    )
    assert_right(around[1:4], x, weight, None)
    assert (around[[0, 4]] == 7.0).all()


@kernel(cache=False)
def _three_tiles(x: Any, keys: Any, width: int, half: int, carried: Any, plain: Any, ahead: Any, parts: Any) -> None:
    simd.dot_tile_ahead(x, 0, width, keys, 0, width, width, True, True, carried, 0, plain, 0, 8, 0, 0, 3, 4, 0)
    simd.dot_tile_ahead(x, 0, width, keys, 4 * width, width, width, True, True, carried, 0, plain, 4, 8, 0, 0, 3, 4, 0)
    simd.dot_tile_ahead(x, 0, width, keys, 0, width, width, True, True, carried, 0, ahead, 0, 8, 8 * width, 32, 3, 8, 2)
    simd.dot_tile_ahead(x, 0, width, keys, 0, width, half, True, False, carried, 0, parts, 0, 8, 0, 0, 3, 8, 0)
    rest = width - half
    simd.dot_tile_ahead(x, half, width, keys, half, width, rest, False, True, carried, 0, parts, 0, 8, 0, 0, 3, 8, 0)


def test_neither_fetching_ahead_nor_parts_change_a_bit() -> None:
    x, keys = random(3, 16 * LANES), random(8, 16 * LANES)
    plain, ahead, parts = torch.empty(24), torch.zeros(24), torch.zeros(24)
    carried = torch.full((24 * LANES,), float("nan"))
    _three_tiles(
        x.flatten().numpy(), keys.flatten().numpy(), 16 * LANES, 5 * LANES, carried.numpy(), plain.numpy(),
        ahead.numpy(), parts.numpy(),
    )  # fmt: skip
    assert torch.equal(plain, ahead)
    assert torch.equal(plain, parts)
    assert_right(ahead.view(3, 8), x, keys, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_torchs(dtype: torch.dtype) -> None:
    x, weight, bias = random(2, 24).to(dtype), random(5, 24).to(dtype), random(5).to(dtype)
    assert torch.equal(linear.linear(x, weight, bias), F.linear(x, weight, bias))


X, WEIGHT = torch.zeros(2, 8), torch.zeros(5, 8)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((X.double(), WEIGHT, None), "x: torch.float64"),
        ((X[None], WEIGHT, None), "x: torch.float32"),
        ((torch.zeros(8, 2).T, WEIGHT, None), "x: strides"),
        ((X, WEIGHT[:, :7], None), "weight: shape"),
        ((X, torch.zeros(8, 5).T, None), "weight: strides"),
        ((X, WEIGHT, torch.zeros(4)), "bias: 4 entries"),
        ((X, WEIGHT, torch.zeros(5, dtype=torch.float64)), "bias: torch.float64"),
        ((X, WEIGHT, torch.zeros(10)[::2]), "bias: strides"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(args: tuple, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        linear.linear(*args)
