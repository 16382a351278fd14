import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from izh.sampling.blocks import first_max, mass, pick, pick_short, top_candidates

WIDTHS = [1, 7, 32, 255, 256, 257, 4096, 4099, 10_007]  # below, at and beyond whole blocks


def rows(num_columns, *, seed=0, num_rows=5, levels=None):
    """Rows of normal numbers; with `levels`, of that many distinct values, so that ties abound."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, levels, (num_rows, num_columns)) if levels else rng.normal(size=(num_rows, num_columns))
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("levels", [None, 3])
@pytest.mark.parametrize("num_columns", WIDTHS)
def test_first_max_is_the_lowest_column_of_the_maximum(num_columns, levels):
    x = rows(num_columns, levels=levels)
    values, columns = first_max(x)
    assert values.tolist() == x.numpy().max(1).tolist()
    assert columns.tolist() == x.numpy().argmax(1).tolist()


@pytest.mark.parametrize("place", [0, 300, 4098])
def test_first_max_shows_a_nan_of_its_own_row_only(place):
    x = rows(4099)
    x[2, place] = torch.nan
    values, columns = first_max(x)
    assert values.isnan().tolist() == [False, False, True, False, False]
    assert columns[2] == place


@pytest.mark.parametrize("levels", [None, 3, 200])
@pytest.mark.parametrize("count", [1, 20, 128])
@pytest.mark.parametrize("num_columns", WIDTHS)
def test_candidates_are_the_largest(num_columns, count, levels):
    x = rows(num_columns, levels=levels)
    values, columns = top_candidates(x, count)
    expected = -np.sort(-x.numpy(), axis=1)[:, :count]
    np.testing.assert_array_equal(values.numpy(), expected)
    np.testing.assert_array_equal(x.gather(1, columns).numpy(), expected)
    assert all(len(set(row)) == len(row) for row in columns.tolist())


@pytest.mark.parametrize("num_columns", WIDTHS)
def test_mass_is_the_sum(num_columns):
    x = rows(num_columns).exp()
    np.testing.assert_allclose(mass(x).numpy(), x.double().numpy().sum(1), rtol=1e-14)


@given(
    num_columns=st.sampled_from(WIDTHS),
    seed=st.integers(0, 1000),
    zeros=st.floats(0, 0.999),
    uniform=st.floats(0, 1, exclude_max=True),
)
@settings(deadline=None)
def test_pick_is_the_inverse_of_the_cumulative_sum(num_columns, seed, zeros, uniform):
    rng = np.random.default_rng(seed)
    weights = np.exp(3 * rng.normal(size=(1, num_columns))).astype(np.float32)
    weights[rng.random((1, num_columns)) < zeros] = 0.0
    weights[0, rng.integers(num_columns)] = 1.0  # never all zero
    ends = weights.astype(np.float64).cumsum()
    for way in (pick, pick_short):
        column = way(torch.from_numpy(weights), torch.tensor([uniform], dtype=torch.float64)).item()
        assert weights[0, column] > 0
        slack = 1e-12 * ends[-1]  # the sums may be taken in another order
        assert ends[column] > uniform * ends[-1] - slack
        assert ends[column] - weights[0, column] <= uniform * ends[-1] + slack


@pytest.mark.parametrize("way", [pick, pick_short])
@pytest.mark.parametrize("num_columns", [7, 4099])
def test_pick_at_the_very_ends_finds_a_positive_weight(way, num_columns):
    weights = torch.zeros(2, num_columns)
    weights[:, 2:5] = torch.tensor([0.1, 0.3, 1e-30])
    uniform = torch.tensor([0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert way(weights, uniform).tolist()[0] == 2
    assert way(weights, uniform).tolist()[1] in (3, 4)


def test_rounding_never_lands_on_a_column_without_weight():
    """Targets on the boundary of a block, and next to the whole mass, where sums in another order may disagree."""
    rng = np.random.default_rng(0)
    weights = torch.from_numpy(np.exp(9 * rng.normal(size=(2000, 768))).astype(np.float32))
    weights[:, [0, 255, 256, 257, 511, 512, 513]] = 0.0
    weights[:, 700:] = 0.0
    boundary = weights[:, :256].sum(1, dtype=torch.float64) / mass(weights)
    for uniform in (boundary, torch.full((2000,), float(np.nextafter(1.0, 0.0)), dtype=torch.float64)):
        for way in (pick, pick_short):
            assert (weights.gather(1, way(weights, uniform)[:, None]) > 0).all()


def test_a_row_is_read_alike_alone_and_among_others():
    x = rows(10_007, num_rows=9).exp()
    uniform = torch.from_numpy(np.random.default_rng(1).random(9))
    for i in range(9):
        alone = x[i : i + 1].clone()
        assert torch.equal(mass(x)[i : i + 1], mass(alone))
        assert torch.equal(pick(x, uniform)[i : i + 1], pick(alone, uniform[i : i + 1]))
        for whole, part in zip(top_candidates(x, 128), top_candidates(alone, 128), strict=True):
            assert torch.equal(whole[i : i + 1], part)
