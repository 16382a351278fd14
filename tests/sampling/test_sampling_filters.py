import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import inverse_cdf, kept

from izh.kernels.select import select
from izh.request import SamplingParams
from izh.sampling.filters import filters_of

CPU = torch.device("cpu")

FILTERS = [
    {"top_k": 2},
    {"top_k": 50},
    {"top_k": 128},
    {"top_k": 129},
    {"top_k": 1000},
    {"top_k": 10**9},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.001},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 600, "top_p": 0.8},
    {"top_k": 600, "min_p": 0.3},
    {"min_p": 0.02, "top_p": 0.9},
    {"min_p": 0.02, "top_p": 0.9, "top_k": 30},
]


def tokens(logits, params, uniform):
    """The tokens that a batch draws: the same by definition and by the CPU's kernel."""
    x = torch.tensor(np.asarray(logits), dtype=torch.float32)
    args = x, x.amax(1), filters_of(params, x.shape[1], CPU), torch.tensor(np.asarray(uniform), dtype=torch.float64)
    drawn = select(CPU, "numba").draw(*args)
    assert torch.equal(select(CPU, "reference").draw(*args), drawn)
    return drawn.tolist()


def assert_drawn(token, logits, params, uniform):
    """`token` is what the inverse CDF gives, up to float32 rounding of the probabilities at its two ends."""
    p = kept(np.asarray(logits, np.float32).astype(np.float64), params)
    assert p[token] > 0
    ends = p.cumsum()
    assert ends[token] - p[token] - 3e-6 <= uniform < ends[token] + 3e-6


@pytest.mark.parametrize("width", [1.0, 4.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("vocab_size", [11, 5003])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_every_filter_against_its_definition(filters, vocab_size, width):
    rng = np.random.default_rng(vocab_size)
    logits = (width * rng.normal(size=(8, vocab_size))).astype(np.float32)
    uniform = rng.random(8)
    params = [SamplingParams(temperature=t, **filters) for t in (0.3, 0.7, 1.0, 1.0, 1.3, 2.0, 5.0, 20.0)]
    for i, token in enumerate(tokens(logits, params, uniform)):
        assert_drawn(token, logits[i], params[i], uniform[i])


@given(
    rows=st.lists(
        st.tuples(
            st.floats(0.1, 10),
            st.sampled_from([0, 2, 5, 127, 128, 129, 400]),
            st.sampled_from([0.05, 0.5, 0.9, 1.0]),
            st.sampled_from([0.0, 0.01, 0.5]),
            st.sampled_from([1.0, 3.0, 6.0]),
            st.floats(0, 1, exclude_max=True),
        ),
        min_size=1,
        max_size=6,
    ),
    vocab_size=st.sampled_from([5, 300, 5000]),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_mixed_batches_against_the_definition(rows, vocab_size, seed):
    normal = np.random.default_rng(seed).normal(size=(len(rows), vocab_size))
    logits = np.array([row[4] for row in rows])[:, None] * normal
    params = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m, _, _ in rows]
    uniform = [row[5] for row in rows]
    together = tokens(logits, params, uniform)
    for i, token in enumerate(together):
        assert_drawn(token, logits[i], params[i], uniform[i])
        assert tokens(logits[i : i + 1], params[i : i + 1], uniform[i : i + 1]) == [token]


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.1}, {"top_p": 0.3}, {"min_p": 1.0}], ids=str)
def test_ties_at_the_edge_are_all_kept(filters):
    """Two tokens above, 500 tied at the edge (more than there are candidates), the rest far below."""
    logits = np.full(5000, -30.0)
    logits[[7, 4000]] = 0.5 if "min_p" not in filters else 0.0
    logits[1000:1500] = 0.0
    grid = (np.arange(1200) + 0.5) / 1200
    drawn = set(tokens(np.tile(logits, (1200, 1)), [SamplingParams(**filters)] * 1200, grid))
    assert drawn == {7, 4000, *range(1000, 1500)}


def test_forbidden_tokens_are_never_drawn():
    logits = np.full((64, 5000), -np.inf)
    logits[:, [3, 4999]] = 1.0
    uniform = np.linspace(0, 1, 64, endpoint=False)
    for filters in ({"top_k": 50}, {"top_k": 1000}, {"top_p": 0.99}, {"min_p": 0.001}):
        assert tokens(logits, [SamplingParams(**filters)] * 64, uniform) == [3] * 32 + [4999] * 32


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.6, "min_p": 0.05}],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_the_distribution_by_chi_square(temperature, filters):
    """20,000 draws over 40 tokens; 4.4 standard deviations above the mean is about one failure in 30,000."""
    num_draws = 20_000
    rng = np.random.default_rng(11)
    logits = 1.5 * rng.normal(size=40)
    params = SamplingParams(temperature=temperature, **filters)
    p = kept(logits, params)
    drawn = tokens(np.tile(logits, (num_draws, 1)), [params] * num_draws, rng.random(num_draws))
    counts = np.bincount(drawn, minlength=40)
    assert counts[p == 0].sum() == 0
    expected = num_draws * p[p > 0]
    chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 4.4 * np.sqrt(2 * freedom)


def test_unfiltered_draws_are_the_inverse_cdf_of_the_softmax():
    rng = np.random.default_rng(5)
    logits, uniform = rng.normal(size=(50, 5003)).astype(np.float32), rng.random(50)
    params = SamplingParams(temperature=0.7)
    drawn = tokens(logits, [params] * 50, uniform)
    exact = [inverse_cdf(kept(row.astype(np.float64), params), u) for row, u in zip(logits, uniform, strict=True)]
    assert np.mean(np.equal(drawn, exact)) > 0.9  # a number close to a boundary may fall on its other side
    for row, token, u in zip(logits, drawn, uniform, strict=True):
        assert_drawn(token, row, params, u)
