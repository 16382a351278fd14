"""The kernel is the definition to the last bit, whatever the shape, the company, the threads and the registers."""

from typing import Any

import numba
import numpy as np
import pytest
import torch

from izh.kernels import int8
from izh.kernels.cpu import linear_int8
from izh.kernels.cpu.compile import kernel
from izh.kernels.cpu.simd_int8 import LANES, integer_tile
from izh.kernels.cpu.table import NUMBA
from izh.kernels.cpu.threads import choose_layer

choose_layer()

MANY = linear_int8.PARALLEL_WORK // 576 // 96 + 1  # rows that several threads share


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("outputs", [1, 15, 16, 33, 97, 576])
@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 129, 576])
def test_the_kernel_is_the_definition(width: int, outputs: int, bias: bool) -> None:
    weight, added = random(outputs, width), random(outputs) if bias else None
    mine, defined = NUMBA.quantize_linear(weight, added), int8.quantize_linear(weight, added)
    for rows in (0, *range(1, 14), 63, 64, 131):
        x = random(rows, width)
        assert torch.equal(mine(x), defined(x))
    assert torch.equal(mine.rows(torch.arange(outputs)), defined.rows(torch.arange(outputs)))
    assert mine.holds(weight)
    assert not mine.holds(weight + 1)


def test_more_rows_than_a_panel_holds() -> None:
    weight, x = random(40, 8000), random(3 * (linear_int8._PANEL // 8000) + 5, 8000)
    mine, defined = NUMBA.quantize_linear(weight, None), int8.quantize_linear(weight, None)
    assert torch.equal(mine(x), defined(x))


@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh", "relu"])
def test_activations(activation: Any) -> None:
    weight, x = random(40, 64), random(5, 64)
    mine, defined = NUMBA.quantize_linear(weight, None), int8.quantize_linear(weight, None)
    assert torch.equal(mine(x, activation), defined(x, activation))


@pytest.mark.parametrize(("width", "outputs"), [(576, 96), (77, 413)])
def test_a_row_is_bit_for_bit_the_same_among_any_rows(width: int, outputs: int) -> None:
    x = random(MANY + 40, width)
    layer = NUMBA.quantize_linear(random(outputs, width), random(outputs))
    whole = layer(x)
    for rows in (*range(1, 26), MANY, MANY + 1):
        assert torch.equal(layer(x[:rows]), whole[:rows])
        assert torch.equal(layer(x[-rows:]), whole[-rows:])


def test_a_row_is_bit_for_bit_the_same_on_any_number_of_threads() -> None:
    x, layer = random(MANY, 576), NUMBA.quantize_linear(random(963, 576), None)
    whole = layer(x)
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        assert torch.equal(layer(x), whole)
    finally:
        numba.set_num_threads(before)


def test_a_row_that_is_not_finite_stays_alone_and_zeros_are_the_bias() -> None:
    x, bias = random(5, 64), random(40)
    layer = NUMBA.quantize_linear(random(40, 64), bias)
    whole = layer(x)
    x[1, 3], x[2, 5], x[3] = float("nan"), float("-inf"), 0.0
    out = layer(x)
    assert out[1:3].isnan().all()
    assert torch.equal(out[3], bias)
    assert torch.equal(out[[0, 4]], whole[[0, 4]])


def test_tiny_and_huge_rows_keep_their_precision() -> None:
    weight, x = random(40, 64), random(1, 64)
    layer = NUMBA.quantize_linear(weight, None)
    for size in (2.0**-60, 2.0**60):
        assert torch.equal(layer(x * size), layer(x) * size)


def test_rows_of_x_may_be_views_of_wider_ones() -> None:
    x, layer = random(9, 300)[:, 11:230], NUMBA.quantize_linear(random(33, 256)[:, 30:249], None)
    assert torch.equal(layer(x), layer(x.contiguous()))


def test_weights_are_kept_in_8_bits_only() -> None:
    layer = NUMBA.quantize_linear(random(1536, 576), None)
    assert layer.num_bytes == 1536 * (576 + 4 * 9)


def _tile_of(num_rows: int, num_blocks: int) -> Any:
    @kernel(cache=False)
    def run(x: Any, weights: Any, scales: Any, width: int, out: Any) -> None:
        integer_tile(x, 0, weights, 0, scales, 0, width, 64, out, num_rows, num_blocks)

    return run


@pytest.mark.parametrize(("num_rows", "num_blocks"), [(1, 1), (6, 1), (1, 2), (6, 2)])
def test_the_largest_numbers_are_summed_exactly_in_tiles_of_every_size(num_rows: int, num_blocks: int) -> None:
    x = np.full((num_rows, 100), int8.TOP, np.int16)
    x[-1] = -int8.TOP
    weights = np.full((num_blocks, 50, LANES, 2), 127, np.int8)
    weights[..., 1::2, :] = -127
    scales = np.full((num_blocks, 2, LANES), 0.5, np.float32)
    out = np.zeros((num_rows, num_blocks, LANES), np.float32)
    _tile_of(num_rows, num_blocks)(x.reshape(-1), weights.reshape(-1), scales.reshape(-1), 100, out.reshape(-1))
    expected = [np.float32(count * 127 * int8.TOP) * np.float32(0.5) for count in (64, 36)]
    for i in range(num_rows):
        for j in range(LANES):
            sign = np.float32(1 - 2 * (j % 2)) * (-1 if i == num_rows - 1 else 1)
            assert (out[i, :, j] == sign * (expected[0] + expected[1])).all()


LAYER, X = NUMBA.quantize_linear(torch.ones(5, 8), None), torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LAYER(X.double()), "x: torch.float64"),
        (lambda: LAYER(X[None]), "x: torch.float32"),
        (lambda: LAYER(torch.zeros(8, 2).T), "x: strides"),
        (lambda: LAYER(X[:, :7]), "x: rows of 7 for a weight of 8"),
        (lambda: NUMBA.quantize_linear(X.double(), None), "weight: torch.float64"),
        (lambda: NUMBA.quantize_linear(X, torch.zeros(4)), "bias: 4 entries"),
        (lambda: NUMBA.quantize_linear(X, torch.zeros(4)[::2]), "bias: strides"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        make()
