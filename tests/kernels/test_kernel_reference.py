"""The reference is the definition, so it is checked against the words of `ops.py`, one scalar at a time."""

import math

import pytest
import torch
from kernel_cases import paged_case

from izh.kernels.reference import REFERENCE


@pytest.mark.parametrize("window", [None, 1, 9])
def test_paged_attention_is_a_softmax_over_the_keys_a_row_sees(window: int | None) -> None:
    case = paged_case([5, 21, 12], [1, 4, 12], heads=4, kv_heads=2, width=8, block=4)
    out = REFERENCE.paged_attention(*case.args(window))
    for s in range(3):
        start, stop = case.query_starts[s : s + 2].tolist()
        for t in range(start, stop):
            p = int(case.context_lens[s]) - (stop - t)
            keys = [j for j in range(p + 1) if window is None or j > p - window]
            places = [(int(case.block_table[s, j // 4]), j % 4) for j in keys]
            for h in range(4):
                k = torch.stack([case.k_pages[b, h // 2, i] for b, i in places]).double()
                v = torch.stack([case.v_pages[b, h // 2, i] for b, i in places]).double()
                weights = (case.scale * (k @ case.q[t, h].double())).softmax(0)
                torch.testing.assert_close(out[t, h].double(), weights @ v, rtol=1e-5, atol=1e-5)


def test_rope_turns_pairs_of_the_two_halves() -> None:
    q, k, angle = torch.randn(3, 2, 10), torch.randn(3, 1, 10), torch.randn(3, 4)
    for x, out in zip((q, k), REFERENCE.rope(q, k, angle.cos(), angle.sin()), strict=True):
        turned = torch.complex(x[..., :4], x[..., 4:8]) * torch.polar(torch.ones(3, 4), angle)[:, None]
        expected = torch.cat((turned.real, turned.imag, x[..., 8:]), -1)
        torch.testing.assert_close(out, expected)


def test_write_kv_fills_slots_and_leaves_the_rest() -> None:
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    k_pages, v_pages = torch.zeros(2, 2, 4, 4), torch.zeros(2, 2, 4, 4)
    REFERENCE.write_kv(k, v, k_pages, v_pages, torch.tensor([6, -1, 1]))
    assert torch.equal(k_pages[1, :, 2], k[0])
    assert torch.equal(v_pages[0, :, 1], v[2])
    assert int((k_pages != 0).any(-1).sum()) == int((v_pages != 0).any(-1).sum()) == 4


def test_norms_and_activations_by_their_formulas() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    normed, total = REFERENCE.add_rms_norm(x, residual, weight, 1e-3)
    assert torch.equal(total, x + residual)
    for row, out in zip(total.tolist(), normed.tolist(), strict=True):
        root = math.sqrt(sum(a * a for a in row) / 8 + 1e-3)
        assert out == pytest.approx([a / root * w for a, w in zip(row, weight.tolist(), strict=True)], rel=1e-4)
    silu, gelu = REFERENCE.silu_mul(x), REFERENCE.gelu_tanh_mul(x)
    for i in range(3):
        for j in range(4):
            a, b = float(x[i, j]), float(x[i, j + 4])
            tanh = math.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))
            assert float(silu[i, j]) == pytest.approx(a / (1 + math.exp(-a)) * b, rel=1e-4, abs=1e-6)
            assert float(gelu[i, j]) == pytest.approx(0.5 * a * (1 + tanh) * b, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_float_dtype_comes_back_as_it_went_in(dtype: torch.dtype) -> None:
    case = paged_case([9, 6], [1, 6], heads=2, kv_heads=1, width=8, block=4)
    q, k_pages, v_pages, *rest = case.args(None)
    exact = REFERENCE.paged_attention(q, k_pages, v_pages, *rest)
    out = REFERENCE.paged_attention(q.to(dtype), k_pages.to(dtype), v_pages.to(dtype), *rest)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.05)
    large = torch.full((2, 64), 300.0, dtype=dtype)  # its square does not fit float16
    ones = torch.ones(64, dtype=dtype)
    torch.testing.assert_close(REFERENCE.rms_norm(large, ones, 1e-6), torch.ones(2, 64, dtype=dtype))
    q, k = REFERENCE.rope(q.to(dtype), q.to(dtype), torch.ones(7, 4), torch.zeros(7, 4))
    assert q.dtype == k.dtype == REFERENCE.silu_mul(large).dtype == REFERENCE.gelu_tanh_mul(large).dtype == dtype
