"""The vector code of attention, by what it says it computes."""

import numpy as np
import pytest
import torch

from izh.kernels.cpu.compile import kernel
from izh.kernels.cpu.product import add_product
from izh.kernels.cpu.simd import LANES, LINE_BYTES
from izh.kernels.cpu.simd_attention import aligned_room, score_tile, softmax_row, transpose_tile

Array = np.ndarray


@kernel(cache=False)
def _transpose(rows: Array, out: Array) -> None:
    transpose_tile(rows, 3, LANES + 1, out, 2, LANES + 2)


@kernel(cache=False)
def _scores_both_ways(queries: Array, keys: Array, turned: Array, width: int, tile: Array, product: Array) -> None:
    score_tile(queries, 0, keys, 0, width, tile, 0, LANES, keys, 3)
    add_product(queries, 0, width, 3, turned, 0, LANES, width, product, 0, LANES, LANES)


@kernel(cache=False)
def _softmax(row: Array, start: int, stop: int, low: int, high: int, maximum: float) -> tuple[float, float]:
    return softmax_row(row, 0, start, stop, low, high, np.float32(maximum))


@kernel(cache=False)
def _product(a: Array, num: int, b: Array, inner: int, out: Array, columns: int) -> None:
    add_product(a, 0, inner, num, b, 0, columns, inner, out, 0, columns, columns)


def random(*shape: int) -> Array:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).numpy()


def test_a_tile_is_transposed_from_where_it_lies_to_where_it_belongs() -> None:
    rows, out = random(LANES * (LANES + 1) + 3), np.zeros(LANES * (LANES + 2) + 2, np.float32)
    _transpose(rows, out)
    expected = rows[3:].reshape(LANES, LANES + 1)[:, :LANES].T
    found = out[2:].reshape(LANES, LANES + 2)
    assert (found[:, :LANES] == expected).all()
    assert not found[:, LANES:].any()
    assert not out[:2].any()


@pytest.mark.parametrize("width", [LANES, 4 * LANES])
def test_few_rows_have_the_bits_of_many(width: int) -> None:
    queries, keys = random(3, width), random(LANES, width)
    tile, product = np.zeros((3, LANES), np.float32), np.zeros((3, LANES), np.float32)
    _scores_both_ways(queries.ravel(), keys.ravel(), keys.T.ravel(), width, tile.ravel(), product.ravel())
    assert (tile == product).all()
    np.testing.assert_allclose(tile, queries @ keys.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("low", "high"), [(0, 4 * LANES), (1, 4 * LANES - 1), (LANES, 2 * LANES), (5, 6), (3, 3)])
def test_the_sum_of_weights_is_the_same_in_any_range_of_columns(low: int, high: int) -> None:
    scores = random(4 * LANES)
    wide, narrow = scores.copy(), scores.copy()
    start, stop = low // LANES * LANES, (high + LANES - 1) // LANES * LANES
    results = [_softmax(wide, 0, 4 * LANES, low, high, -1.0), _softmax(narrow, start, stop, low, high, -1.0)]
    assert results[0] == results[1]
    assert (wide[start:stop] == narrow[start:stop]).all()
    assert not wide[:low].any()
    assert not wide[high:].any()
    maximum = max([-1.0, *scores[low:high].tolist()])
    expected = np.exp2(scores[low:high].astype(np.float64) - maximum)
    assert results[0][0] == np.float32(maximum)
    np.testing.assert_allclose(wide[low:high], expected, rtol=3e-7)
    np.testing.assert_allclose(results[0][1], expected.sum(), rtol=1e-6)


def test_weights_of_very_low_scores_are_as_good_as_zero() -> None:
    row = np.full(LANES, -1e30, np.float32)
    row[1], row[2] = 0.0, -126.0
    maximum, total = _softmax(row, 0, LANES, 0, LANES, -1e30)
    assert (maximum, total, row[1], row[2]) == (0.0, 1.0, 1.0, 2.0**-126)
    assert (row[3:] == 2.0**-126).all()


@pytest.mark.parametrize("num", [1, 2, 3, 5, 6, 10, 13])
@pytest.mark.parametrize("vectors", [1, 2, 3, 4, 7])
def test_a_product_is_the_same_for_any_number_of_rows_and_columns(num: int, vectors: int) -> None:
    a, b, out = random(num, 9), random(9, vectors * LANES), random(num, vectors * LANES)
    expected = out + a @ b
    each = out.copy()
    for i in range(num):
        _product(a[i].copy(), 1, b.ravel(), 9, each[i], vectors * LANES)
    _product(a.ravel(), num, b.ravel(), 9, out.ravel(), vectors * LANES)
    assert (out == each).all()
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [0, 1, 100])
def test_room_begins_a_cache_line(count: int) -> None:
    room = aligned_room(count)
    assert len(room) == count
    assert room.ctypes.data % LINE_BYTES == 0
