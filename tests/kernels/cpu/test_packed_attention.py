"""Attention over sequences laid end to end: the reference by its words, the compiled kernel by the reference."""

import math
from itertools import pairwise

import numba
import pytest
import torch

from izh.kernels.cpu.packed_attention import packed_attention
from izh.kernels.cpu.table import NUMBA
from izh.kernels.cpu.threads import choose_layer
from izh.kernels.reference import REFERENCE

choose_layer()


def case(lens: list[int], heads: int, width: int, spare: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v as views of one fused projection, and the starts."""
    generator = torch.Generator().manual_seed(sum(lens))
    fused = torch.randn(sum(lens), 3 * heads * width + spare, generator=generator)
    q, k, v = fused[:, : 3 * heads * width].unflatten(-1, (3, heads, width)).unbind(1)
    return q, k, v, torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("window", [None, 0, 2])
def test_the_reference_is_a_softmax_over_the_keys_a_row_sees(window: int | None) -> None:
    q, k, v, starts = case([3, 0, 6], heads=2, width=4)
    out = REFERENCE.packed_attention(q, k, v, starts, 0.7, window)
    for begin, end in ((0, 3), (3, 9)):
        for t in range(begin, end):
            seen = [j for j in range(begin, end) if window is None or abs(j - t) <= window]
            for h in range(2):
                weights = [math.exp(0.7 * float(q[t, h] @ k[j, h])) for j in seen]
                expected = sum(w * v[j, h] for w, j in zip(weights, seen, strict=True)) / sum(weights)
                torch.testing.assert_close(out[t, h], expected)


@pytest.mark.parametrize("window", [None, 0, 5, 64])
@pytest.mark.parametrize(("heads", "width"), [(12, 32), (3, 64), (2, 7), (1, 40), (2, 96)])
@pytest.mark.parametrize("lens", [[1], [2, 1, 3], [11, 0, 12, 13], [97, 200, 5]])
def test_the_kernel_is_the_reference(lens: list[int], heads: int, width: int, window: int | None) -> None:
    args = (*case(lens, heads, width, spare=3), width**-0.5, window)
    expected = REFERENCE.packed_attention(*args)
    torch.testing.assert_close(packed_attention(*args), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [None, 20])
def test_a_sequence_is_the_same_alone_and_among_others_on_any_number_of_threads(window: int | None) -> None:
    q, k, v, starts = case([5, 300, 1, 40, 130], heads=4, width=32)
    before = numba.get_num_threads()
    try:
        results = []
        for threads in range(1, numba.config.NUMBA_NUM_THREADS + 1):
            numba.set_num_threads(threads)
            results.append(packed_attention(q, k, v, starts, 0.2, window))
    finally:
        numba.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])
    bounds = starts.tolist()
    for start, stop in pairwise(bounds):
        rows = slice(start, stop)
        alone = packed_attention(
            q[rows], k[rows], v[rows], torch.tensor([0, stop - start], dtype=torch.int32), 0.2, window
        )
        assert torch.equal(alone, results[0][rows])


def test_large_scores_neither_overflow_nor_vanish() -> None:
    q, k, v, starts = case([60, 9], heads=2, width=32)
    out = NUMBA.packed_attention(q * 300, k, v, starts, 1.0, None)
    expected = REFERENCE.packed_attention(q * 300, k, v, starts, 1.0, None)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


def test_nothing_is_nothing() -> None:
    q, k, v, starts = case([], heads=2, width=8)
    assert packed_attention(q, k, v, starts, 1.0, None).shape == (0, 2, 8)


Q, K, V, STARTS = case([3, 4], heads=2, width=8)


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("q", (Q.double(), K, V, STARTS, 1.0, None), "float64"),
        ("k", (Q, K[:6], V, STARTS, 1.0, None), "differ from q's"),
        ("v", (Q, K, V[..., :4], STARTS, 1.0, None), "differ from q's"),
        ("k", (Q, K.transpose(0, 1).contiguous().transpose(0, 1), V, STARTS, 1.0, None), "differ from q's"),
        ("starts", (Q, K, V, STARTS.long(), 1.0, None), "int64"),
        ("starts", (Q, K, V, STARTS[:0], 1.0, None), "is empty"),
        ("starts", (Q, K, V, STARTS[:2].contiguous(), 1.0, None), "must rise from 0"),
        ("starts", (Q, K, V, torch.tensor([0, 8, 7], dtype=torch.int32), 1.0, None), "must rise from 0"),
        ("window", (Q, K, V, STARTS, 1.0, -1), "0 keys on each side"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, args: tuple, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .*{says}"):
        packed_attention(*args)
