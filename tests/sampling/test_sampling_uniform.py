import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from izh.sampling.uniform import Uniforms, stream_key


@given(seed=st.integers(-(2**63), 2**63 - 1), choice=st.integers(0, 127), index=st.integers(0, 2**40))
def test_it_is_what_numpys_philox_draws_at_that_counter(seed, choice, index):
    philox = np.random.Philox(
        key=np.array([seed % 2**64, choice], np.uint64), counter=np.array([index, 0, 0, 0], np.uint64)
    )
    assert Uniforms().at(stream_key(seed, choice), index) == np.random.Generator(philox).random()


def test_a_draw_depends_on_no_other():
    uniforms = Uniforms()
    keys = [stream_key(seed, choice) for seed in (0, 1, -1) for choice in (0, 1)]
    first = {(key, index): uniforms.at(key, index) for key in keys for index in range(20)}
    for key, index in reversed(first):
        assert uniforms.at(key, index) == first[key, index]
    assert len(set(first.values())) == len(first)


def test_draws_are_uniform():
    uniforms = Uniforms()
    draws = np.array([[uniforms.at((seed, 0), index) for index in range(200)] for seed in range(100)])
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    for sample in (draws.ravel(), draws[:, 0], draws[0]):
        deviation = np.abs(np.sort(sample) - (np.arange(len(sample)) + 0.5) / len(sample)).max()
        assert deviation < 1.95 / np.sqrt(len(sample))  # Kolmogorov-Smirnov, p = 0.001
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.03


def test_without_a_seed_each_stream_is_new():
    assert stream_key(None, 3)[1] == 3
    assert len({stream_key(None, 0) for _ in range(100)}) == 100


@pytest.mark.parametrize("seed", [0, 2**63 - 1, -(2**63)])
def test_any_64_bit_seed_makes_a_key(seed):
    assert 0 <= stream_key(seed, 0)[0] < 2**64
