import numpy as np
import pytest
import torch

from izh.kernels.cpu.table import NUMBA
from izh.kernels.ops import Ops
from izh.kernels.reference import REFERENCE

TABLES = pytest.mark.parametrize("ops", [REFERENCE, NUMBA], ids=["reference", "numba"])


def rows(num_columns: int, num_rows: int = 5, levels: int | None = None) -> torch.Tensor:
    """Rows of normal numbers; with `levels`, of that many distinct values, so that ties abound."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, levels, (num_rows, num_columns)) if levels else rng.normal(size=(num_rows, num_columns))
    return torch.from_numpy(x.astype(np.float32))


@TABLES
@pytest.mark.parametrize("levels", [None, 3])
@pytest.mark.parametrize("num_columns", [1, 7, 255, 256, 257, 4096, 4099, 10_007])
def test_the_lowest_column_of_the_maximum(num_columns: int, levels: int | None, ops: Ops) -> None:
    x = rows(num_columns, levels=levels)
    values, columns = ops.first_max(x)
    expected = [max(range(num_columns), key=lambda i: (row[i], -i)) for row in x.tolist()]
    assert columns.tolist() == expected
    assert columns.dtype is torch.int64
    assert values.tolist() == [row[i] for row, i in zip(x.tolist(), expected, strict=True)]


@TABLES
@pytest.mark.parametrize("place", [0, 300, 4098])
def test_a_nan_shows_in_its_own_row_only(place: int, ops: Ops) -> None:
    x = rows(4099)
    x[2, place] = torch.nan
    x[3] = -torch.inf
    values, columns = ops.first_max(x)
    assert values.isnan().tolist() == [False, False, True, False, False]
    assert columns[2] == place
    assert (values[3], columns[3]) == (-torch.inf, 0)


def test_a_view_of_wider_rows() -> None:
    x = rows(600)
    for found, expected in zip(NUMBA.first_max(x[:, 7:300]), REFERENCE.first_max(x[:, 7:300]), strict=True):
        assert torch.equal(found, expected)


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^x: torch\.float64"):
        NUMBA.first_max(torch.zeros(2, 3, dtype=torch.float64))
