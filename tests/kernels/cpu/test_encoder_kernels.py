"""Frozen linear layers and layer norm: compiled against the reference, the reference against torch's own modules."""

import pytest
import torch
import torch.nn.functional as F

from izh.kernels.cpu import layer_norm
from izh.kernels.cpu.frozen import freeze_linear
from izh.kernels.cpu.table import NUMBA
from izh.kernels.cpu.threads import choose_layer
from izh.kernels.reference import REFERENCE

choose_layer()

ROWS = [0, 1, 5, 300]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("ops", [REFERENCE, NUMBA])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "has_bias"), [(1, True), (7, False), (384, True), (1001, False)])
def test_layer_norm_is_torchs(ops, rows: int, width: int, has_bias: bool) -> None:
    x, weight = random(rows, width + 3)[:, :width], random(width)
    bias = random(width + 1)[1:] if has_bias else None
    expected = F.layer_norm(x, (width,), weight, bias, 1e-5)
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, 1e-5), expected, rtol=2e-5, atol=2e-5)
    residual = random(rows, width + 9)[:, :width]
    total = x + residual
    out, kept = ops.add_layer_norm(x, residual, weight, bias, 1e-5)
    expected = F.layer_norm(total, (width,), weight, bias, 1e-5)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(kept, total)


@pytest.mark.parametrize("ops", [REFERENCE, NUMBA])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "width", "has_bias"), [(1, 1, True), (37, 19, False), (96, 64, True)])
def test_frozen_linear_is_torchs(ops, rows: int, outputs: int, width: int, has_bias: bool) -> None:
    x, weight = random(rows, width + 2)[:, :width], random(outputs, width)
    bias = random(outputs) if has_bias else None
    frozen = ops.freeze_linear(weight.clone(), bias)
    plain = F.linear(x, weight, bias)
    for activation, expected in (
        ("none", plain),
        ("gelu", F.gelu(plain)),
        ("gelu_tanh", F.gelu(plain, approximate="tanh")),
        ("relu", F.relu(plain)),
    ):
        torch.testing.assert_close(frozen(x, activation), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(frozen(x), plain, rtol=2e-5, atol=2e-5)


def test_a_row_is_the_same_among_any_number_of_rows() -> None:
    x, weight, bias = random(300, 384), random(96, 384), random(96)
    frozen, size = freeze_linear(weight, bias), (1, 7, 64, 300)
    norm, shift = random(384), random(384)
    for op in (lambda rows: frozen(rows, "gelu"), lambda rows: NUMBA.layer_norm(rows, norm, shift, 1e-12)):
        whole = op(x)
        assert all(torch.equal(whole, torch.cat([op(part) for part in x.split(n)])) for n in size)


def test_other_dtypes_run_as_the_reference_does() -> None:
    x, weight = random(4, 8).double(), random(3, 8).double()
    assert torch.equal(freeze_linear(weight, None)(x, "gelu"), F.gelu(F.linear(x, weight)))


ROW = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: layer_norm.layer_norm(ROW.double(), ROW[0], None, 1e-5), "x: torch.float64"),
        (lambda: layer_norm.layer_norm(ROW, ROW[0, :7], None, 1e-5), "weight: 7 entries"),
        (lambda: layer_norm.layer_norm(ROW, ROW[0], ROW[0, :7], 1e-5), "bias: 7 entries"),
        (lambda: layer_norm.add_layer_norm(ROW, ROW[:1], ROW[0], None, 1e-5), "residual: shape"),
        (lambda: freeze_linear(ROW, ROW[0]), "weight: shape"),
        (lambda: freeze_linear(ROW, None)(ROW[:, :7]), "x: torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        call()
