"""What makes the definition of a draw one: weights as exact as they claim, sums that no order changes."""

import numpy as np
import pytest
import torch

from izh.kernels.draw import Filters, draw, scale_of, weigh


@pytest.mark.parametrize("num_columns", [1, 2, 50, 49_152, 49_153, 262_144, 1 << 20])
def test_the_weights_of_any_row_add_up_exactly(num_columns: int) -> None:
    scale = scale_of(num_columns)
    assert num_columns * scale <= 2**53
    assert weigh(torch.zeros(3), scale).tolist() == [scale] * 3
    assert num_columns < 1 << 13 or (num_columns - 1) * scale * 2 > 2**52  # nothing is given away


def test_a_weight_is_the_exponential() -> None:
    x = -torch.linspace(0, 30, 100_001)
    scale = scale_of(50_000)
    exact = np.exp(x.double().numpy()) * scale
    weights = weigh(x, scale).numpy()
    assert (weights == np.rint(weights)).all()
    np.testing.assert_array_less(np.abs(weights - exact), 1.5e-7 * exact + 0.5001)


def test_what_has_no_weight() -> None:
    scale = scale_of(1)
    assert weigh(torch.tensor([-torch.inf, torch.nan, -1e30, -64.0, -29.0]), scale).tolist() == [0.0] * 5


def test_more_rows_than_are_sorted_at_a_time_are_as_each_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(45, 300, generator=generator)
    uniform = torch.rand(45, dtype=torch.float64, generator=generator)
    top_p = torch.rand(45, dtype=torch.float64, generator=generator)
    filters = Filters(torch.ones(45), torch.full((45,), -torch.inf), torch.full((45,), 200), top_p, is_on=True)
    peak = logits.amax(1)
    together = draw(logits, peak, filters, uniform)
    for i in range(45):
        row = slice(i, i + 1)
        assert draw(logits[row], peak[row], filters[row], uniform[row]) == together[i]
