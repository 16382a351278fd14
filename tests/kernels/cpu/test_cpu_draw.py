"""The kernel draws the tokens that the definition does, every one of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from izh.kernels.cpu.draw import draw
from izh.kernels.draw import Filters, scale_of, weigh
from izh.kernels.draw import draw as definition

ALMOST_ONE = float(np.nextafter(1.0, 0.0))
SIZES = [1, 2, 63, 64, 65, 300, 4099]  # about one block, two, many; whole and not


def some_filters(rng: np.random.Generator, rows: int, size: int) -> Filters:
    with np.errstate(divide="ignore"):
        min_logit = np.log(rng.choice([0.0, 0.0, 1e-6, 0.05, 1.0], rows))
    return Filters(
        temperature=torch.from_numpy(rng.choice([1e-5, 0.3, 1.0, 7.0], rows).astype(np.float32)),
        min_logit=torch.from_numpy(min_logit.astype(np.float32)),
        top_k=torch.from_numpy(rng.choice([1, 2, 50, 200, size, size], rows)).clamp(max=size),
        top_p=torch.from_numpy(rng.choice([1e-300, 0.1, 0.5, 0.9, 0.9999, ALMOST_ONE, 1.0, 1.0], rows)),
        is_on=True,
    )


def no_filters(rows: int, size: int) -> Filters:
    ones = torch.ones(rows)
    return Filters(ones, torch.full((rows,), -torch.inf), torch.full((rows,), size), ones.double(), is_on=False)


def uniforms(rng: np.random.Generator, rows: int) -> Tensor:
    """Random numbers, and now and then the ends of their range."""
    return torch.from_numpy(np.where(rng.random(rows) < 0.8, rng.random(rows), rng.choice([0.0, ALMOST_ONE], rows)))


def assert_equal(logits: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    peak = logits.amax(1)
    drawn = draw(logits, peak, filters, uniform)
    assert torch.equal(drawn, definition(logits, peak, filters, uniform))
    assert (logits.gather(1, drawn[:, None]) > -torch.inf).all()
    return drawn


@pytest.mark.parametrize("levels", [None, 1, 8], ids=["", "whole", "eighths"])
@pytest.mark.parametrize("width", [0.0, 1e-3, 1.0, 5.0, 60.0])
@pytest.mark.parametrize("size", SIZES)
def test_random_rows(size: int, width: float, levels: int | None) -> None:
    """With `levels` per unit, ties abound at every edge; at width 0 there is nothing else."""
    rng = np.random.default_rng(size)
    logits = torch.from_numpy((width * rng.normal(size=(160, size))).astype(np.float32))
    if levels:
        logits = (logits * levels).round() / levels
    assert_equal(logits, some_filters(rng, 160, size), uniforms(rng, 160))


@pytest.mark.parametrize("size", [5, 300, 4099])
def test_forbidden_and_forced_tokens(size: int) -> None:
    """Most of a row impossible, one token far above the rest, or nothing but one token."""
    rng = np.random.default_rng(size)
    logits = rng.normal(size=(160, size)).astype(np.float32)
    logits[rng.random((160, size)) < rng.choice([0.0, 0.5, 0.99], (160, 1))] = -np.inf
    forced = rng.integers(size, size=160)
    logits[np.arange(160), forced] = rng.choice([0.0, 3.4e38, 40.0], 160)
    logits[:20] = -np.inf
    logits[np.arange(20), forced[:20]] = -7.0
    drawn = assert_equal(torch.from_numpy(logits), some_filters(rng, 160, size), uniforms(rng, 160))
    assert drawn[:20].tolist() == forced[:20].tolist()


def test_a_flat_vocabulary_is_drawn_to_its_last_token() -> None:
    logits, off = torch.zeros(1, 49_152).expand(5, -1), no_filters(5, 49_152)
    uniform = torch.tensor([0.0, 0.25, 0.5, 0.75, ALMOST_ONE], dtype=torch.float64)
    expected = [0, 12_288, 24_576, 36_864, 49_151]
    assert assert_equal(logits, off, uniform).tolist() == expected
    for filters in (
        replace(off, top_p=torch.full((5,), 0.9).double(), is_on=True),
        replace(off, top_k=torch.full((5,), 3), is_on=True),
        replace(off, min_logit=torch.zeros(5), is_on=True),
    ):  # all are as likely as the last one kept
        assert assert_equal(logits, filters, uniform).tolist() == expected


def test_a_number_on_an_edge_between_two_tokens_belongs_to_the_later() -> None:
    """Weights that are powers of two: the products with the number are exact."""
    logits = torch.full((4, 70), -torch.inf)
    logits[:, [3, 65]] = 0.0
    off = no_filters(4, 70)
    uniform = torch.tensor([0.0, np.nextafter(0.5, 0.0), 0.5, ALMOST_ONE], dtype=torch.float64)
    expected = [3, 3, 65, 65]
    assert assert_equal(logits, off, uniform).tolist() == expected
    assert assert_equal(logits, replace(off, top_k=torch.full((4,), 2), is_on=True), uniform).tolist() == expected
    halves = replace(off, top_p=torch.full((4,), 0.5).double(), is_on=True)
    logits[:, 65] = -1e-6  # the first holds just over half
    assert assert_equal(logits, halves, uniform).tolist() == [3] * 4


@pytest.mark.parametrize("num_kept", [1, 7, 300])
def test_the_last_token_kept_is_the_same_where_its_mass_meets_top_p(num_kept: int) -> None:
    """top_p is exactly, and by a hair more or less than, the share of the likeliest `num_kept`."""
    logits = 2 * torch.randn(1, 4099, generator=torch.Generator().manual_seed(num_kept))
    weights = weigh(logits - logits.amax(), scale_of(4099))[0]
    share = float(weights.sort(descending=True).values[:num_kept].sum() / weights.sum())
    top_p = torch.tensor([np.nextafter(share, 0.0), share, np.nextafter(share, 1.0)] * 400, dtype=torch.float64)
    filters = replace(no_filters(1200, 4099), top_p=top_p, is_on=True)
    assert_equal(logits.expand(1200, -1), filters, torch.linspace(0, 1, 1201, dtype=torch.float64)[:-1])


def test_rows_are_as_each_alone_and_may_be_strided() -> None:
    rng = np.random.default_rng(9)
    wide = torch.from_numpy(rng.normal(size=(40, 700)).astype(np.float32))
    logits, filters, uniform = wide[:, 50:650], some_filters(rng, 40, 600), uniforms(rng, 40)
    before = wide.clone()
    together = assert_equal(logits, filters, uniform)
    assert torch.equal(wide, before)
    for i in range(40):
        row = slice(i, i + 1)
        assert assert_equal(logits[row].clone(), filters[row], uniform[row]) == together[i]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gets_a_column_and_disturbs_nobody(bad: float) -> None:
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.normal(size=(160, 300)).astype(np.float32))
    filters, uniform = some_filters(rng, 160, 300), uniforms(rng, 160)
    healthy = draw(logits, logits.amax(1), filters, uniform)
    if bad == -torch.inf:
        logits[::2] = bad
    else:
        logits[::2, 77] = bad
    drawn = draw(logits, logits.amax(1), filters, uniform)
    assert torch.equal(drawn[1::2], healthy[1::2])
    assert ((drawn >= 0) & (drawn < 300)).all()


def test_no_rows() -> None:
    rng = np.random.default_rng(0)
    logits = torch.zeros(0, 10)
    assert draw(logits, torch.zeros(0), some_filters(rng, 0, 10), uniforms(rng, 0)).shape == (0,)


@pytest.mark.parametrize("name", ["peak", "temperature", "min_logit", "top_k", "top_p", "uniform"])
@pytest.mark.parametrize("wrong", [torch.zeros(2), torch.zeros(3, dtype=torch.int8)], ids=["length", "dtype"])
def test_what_does_not_fit_is_refused_by_name(name: str, wrong: Tensor) -> None:
    rng = np.random.default_rng(0)
    filters, vectors = some_filters(rng, 3, 10), {"peak": torch.zeros(3), "uniform": uniforms(rng, 3)}
    if name in vectors:
        vectors[name] = wrong
    else:
        filters = replace(filters, **{name: wrong})
    with pytest.raises(ValueError, match=f"^{name}: "):
        draw(torch.zeros(3, 10), filters=filters, **vectors)
