import numpy as np
import pytest
import torch

from izh.sampling.blocks import top_candidates

WIDTHS = [1, 7, 32, 255, 256, 257, 4096, 4099, 10_007]  # below, at and beyond whole blocks


def rows(num_columns, *, seed=0, num_rows=5, levels=None):
    """Rows of normal numbers; with `levels`, of that many distinct values, so that ties abound."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, levels, (num_rows, num_columns)) if levels else rng.normal(size=(num_rows, num_columns))
    return torch.from_numpy(x.astype(np.float32))


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


def test_a_row_is_read_alike_alone_and_among_others():
    x = rows(10_007, num_rows=9).exp()
    for i in range(9):
        for whole, part in zip(top_candidates(x, 128), top_candidates(x[i : i + 1].clone(), 128), strict=True):
            assert torch.equal(whole[i : i + 1], part)
