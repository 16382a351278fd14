"""The vector code of attention, by what it says it computes."""

import numpy as np
import pytest
import torch

from izh.kernels.cpu.compile import kernel
from izh.kernels.cpu.product import ANEW, add_product
from izh.kernels.cpu.simd import LANES, LINE_BYTES
from izh.kernels.cpu.simd_attention import ROWS, aligned_room, score_tile, softmax_tile, transpose_tile

Array = np.ndarray


@kernel(cache=False)
def _transpose(rows: Array, out: Array) -> None:
    transpose_tile(rows, 3, LANES + 1, out, 2, LANES + 2)


@kernel(cache=False)
def _scores_both_ways(queries: Array, keys: Array, turned: Array, width: int, tile: Array, product: Array) -> None:
    score_tile(queries, 0, keys, 0, width, tile, 0, LANES, keys, 0, 3)
    add_product(queries, 0, width, 3, turned, 0, LANES, width, product, 0, LANES, LANES, product, ANEW, None, 0)


@kernel(cache=False)
def _softmax(
    scores: Array, columns: int, start: int, stop: int, lows: Array, highs: Array, maxima: Array, totals: Array,
    factors: Array,
) -> None:  # fmt: skip
    softmax_tile(scores, 0, columns, start, stop, 0, lows, highs, maxima, totals, factors)


@kernel(cache=False)
def _product(
    a: Array, num: int, b: Array, inner: int, out: Array, columns: int, factors: Array, factors_at: int
) -> None:  # fmt: skip
    add_product(a, 0, inner, num, b, 0, columns, inner, out, 0, columns, columns, factors, factors_at, b, 0)


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


def softmax(
    scores: Array, start: int, stop: int, low: list[int], high: list[int], maximum: list[float], total: list[float]
) -> tuple[Array, Array, Array]:
    """Of [ROWS, columns], in place -> (maxima, totals, factors)."""
    lows, highs = np.array(low, np.int64), np.array(high, np.int64)
    maxima, totals = np.array(maximum, np.float32), np.array(total, np.float32)
    factors = np.empty(ROWS, np.float32)
    _softmax(scores.ravel(), scores.shape[1], start, stop, lows, highs, maxima, totals, factors)
    return maxima, totals, factors


@pytest.mark.parametrize(("low", "high"), [(0, 4 * LANES), (1, 4 * LANES - 1), (LANES, 2 * LANES), (5, 6), (3, 3)])
def test_a_row_has_the_same_weights_in_any_range_of_columns_beside_any_others(low: int, high: int) -> None:
    scores = random(ROWS, 4 * LANES)
    before, summed = [-1.0, 5.0, -1e30, 0.0], [0.5, 2.0, 0.0, 1.0]
    wide, start, stop = scores.copy(), low // LANES * LANES, (high + LANES - 1) // LANES * LANES
    among = [0, low, 1, low], [4 * LANES, high, 7, high]  # row 0 sees all
    results = softmax(wide, 0, 4 * LANES, *among, before, summed)
    for row in (1, 3):
        alone, others = np.stack([scores[row]] * ROWS), [low] * ROWS
        narrow = softmax(alone, start, stop, others, [high] * ROWS, [before[row]] * ROWS, [summed[row]] * ROWS)
        assert (alone[:, start:stop] == wide[row, start:stop]).all()
        assert all((one == both[row]).all() for one, both in zip(narrow, results, strict=True))
        assert not wide[row, :low].any()
        assert not wide[row, high:].any()
        maximum = max([before[row], *scores[row, low:high].tolist()])
        expected = np.exp2(scores[row, low:high].astype(np.float64) - maximum)
        assert results[0][row] == np.float32(maximum)
        np.testing.assert_allclose(wide[row, low:high], expected, rtol=3e-7)
        np.testing.assert_allclose(results[2][row], np.exp2(before[row] - maximum), rtol=3e-7)
        np.testing.assert_allclose(
            results[1][row], summed[row] * np.exp2(before[row] - maximum) + expected.sum(), rtol=1e-6
        )


def test_weights_of_very_low_scores_are_as_good_as_zero() -> None:
    scores = np.full((ROWS, LANES), -1e30, np.float32)
    scores[:, 1], scores[:, 2] = 0.0, -126.0
    maxima, totals, factors = softmax(scores, 0, LANES, [0] * ROWS, [LANES] * ROWS, [-1e30] * ROWS, [0.0] * ROWS)
    assert (maxima == 0.0).all()
    assert (totals == 1.0).all()
    assert (factors == 2.0**-126).all()
    assert (scores[:, 1] == 1.0).all()
    assert (scores[:, [0, *range(2, LANES)]] == 2.0**-126).all()


@pytest.mark.parametrize("num", [1, 2, 3, 5, 6, 10, 13])
@pytest.mark.parametrize("vectors", [1, 2, 3, 4, 7])
def test_a_product_is_the_same_for_any_number_of_rows_and_columns(num: int, vectors: int) -> None:
    a, b, out = random(num, 9), random(9, vectors * LANES), random(num, vectors * LANES)
    factors = random(num + 2)
    expected = factors[2:, None] * out + a @ b
    each = out.copy()
    for i in range(num):
        _product(a[i].copy(), 1, b.ravel(), 9, each[i], vectors * LANES, factors, 2 + i)
    _product(a.ravel(), num, b.ravel(), 9, out.ravel(), vectors * LANES, factors, 2)
    assert (out == each).all()
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    anew = np.full_like(out, np.nan)
    _product(a.ravel(), num, b.ravel(), 9, anew.ravel(), vectors * LANES, factors, ANEW)
    out[:] = 0.0
    _product(a.ravel(), num, b.ravel(), 9, out.ravel(), vectors * LANES, factors, 2)
    assert (anew == out).all()


@pytest.mark.parametrize("count", [0, 1, 100])
def test_room_begins_a_cache_line(count: int) -> None:
    room = aligned_room(count)
    assert len(room) == count
    assert room.ctypes.data % LINE_BYTES == 0
