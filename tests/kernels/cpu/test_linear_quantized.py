"""The kernel is the definition to the last bit, whatever the shape, the company, the threads and the registers."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba.core.codegen import get_host_cpu_features

from izh.kernels import quantized
from izh.kernels.cpu import linear_quantized
from izh.kernels.cpu.simd import HAS_HALF
from izh.kernels.cpu.simd_integer import ROWS, dot_lanes
from izh.kernels.cpu.table import NUMBA
from izh.kernels.cpu.threads import choose_layer

choose_layer()

FORMS = quantized.FORMS
SCALE_BYTES = 2 if HAS_HALF else 4
MANY = linear_quantized.PARALLEL_WORK // 576 // 96 + 1  # rows that several threads share


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def gated(layer: Any, x: torch.Tensor, gate: int) -> torch.Tensor:
    """What another kernel gets of a layer whose outputs are gates and what goes through them."""
    out, threads = torch.empty(len(x), layer.outputs // 2), numba.get_num_threads()
    fixed = np.array(layer.fixed_arguments)
    linear_quantized.linear_at(fixed, x.data_ptr(), len(x), x.shape[1], out.data_ptr(), gate, threads)
    return out


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("outputs", [1, 15, 16, 33, 97, 576])
@pytest.mark.parametrize("width", [1, 2, 32, 33, 63, 64, 65, 129, 576])
@pytest.mark.parametrize("form", FORMS)
def test_the_kernel_is_the_definition(form: str, width: int, outputs: int, bias: bool) -> None:
    weight, added = random(outputs, width), random(outputs) if bias else None
    mine, defined = NUMBA.quantize_linear(weight, added, form), quantized.quantize_linear(weight, added, form)
    for rows in (0, *range(1, 14), 63, 64, 131):
        x = random(rows, width)
        assert torch.equal(mine(x), defined(x))
    assert torch.equal(mine.rows(torch.arange(outputs)), defined.rows(torch.arange(outputs)))
    assert mine.holds(weight)
    assert not mine.holds(weight + 1)


@pytest.mark.parametrize("form", FORMS)
def test_more_rows_than_a_panel_holds(form: str) -> None:
    weight, x = random(40, 8000), random(3 * (linear_quantized.PANEL_BYTES // 8000) + 5, 8000)
    mine, defined = NUMBA.quantize_linear(weight, None, form), quantized.quantize_linear(weight, None, form)
    assert torch.equal(mine(x), defined(x))


@pytest.mark.parametrize(("gate", "op"), [("SILU", "silu_mul"), ("GELU_TANH", "gelu_tanh_mul")])
@pytest.mark.parametrize(("width", "outputs"), [(33, 32), (576, 96), (1600, 192)])
@pytest.mark.parametrize("form", FORMS)
def test_gates_in_the_product_are_those_after_it(form: str, width: int, outputs: int, gate: str, op: str) -> None:
    assert linear_quantized.can_gate(outputs)
    layer = NUMBA.quantize_linear(random(outputs, width), random(outputs), form)
    for rows in (1, ROWS, ROWS + 1, 131):
        x = random(rows, width)
        out = gated(layer, x, getattr(linear_quantized, gate))
        assert torch.equal(out, getattr(NUMBA, op)(layer(x)))


@pytest.mark.parametrize("outputs", [16, 48, 33])
def test_gates_that_fill_no_block_are_left_to_the_op(outputs: int) -> None:
    assert not linear_quantized.can_gate(outputs)


@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh", "relu"])
def test_activations(activation: Any) -> None:
    weight, x = random(40, 64), random(5, 64)
    mine, defined = NUMBA.quantize_linear(weight, None, "int8"), quantized.quantize_linear(weight, None, "int8")
    assert torch.equal(mine(x, activation), defined(x, activation))


@pytest.mark.parametrize(("width", "outputs"), [(576, 96), (77, 413)])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_bit_for_bit_the_same_among_any_rows(form: str, width: int, outputs: int) -> None:
    x = random(MANY + 40, width)
    layer = NUMBA.quantize_linear(random(outputs, width), random(outputs), form)
    whole = layer(x)
    for rows in (*range(1, 26), MANY, MANY + 1):
        assert torch.equal(layer(x[:rows]), whole[:rows])
        assert torch.equal(layer(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_bit_for_bit_the_same_on_any_number_of_threads(form: str) -> None:
    x, layer = random(MANY, 576), NUMBA.quantize_linear(random(963, 576), None, form)
    whole = layer(x)
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        assert torch.equal(layer(x), whole)
    finally:
        numba.set_num_threads(before)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_is_not_finite_stays_alone_and_zeros_are_the_bias(form: str) -> None:
    x, bias = random(5, 64), random(40)
    layer = NUMBA.quantize_linear(random(40, 64), bias, form)
    whole = layer(x)
    x[1, 3], x[2, 5], x[3] = float("nan"), float("-inf"), 0.0
    out = layer(x)
    assert out[1:3].isnan().all()
    assert torch.equal(out[3], bias)
    assert torch.equal(out[[0, 4]], whole[[0, 4]])


@pytest.mark.parametrize("form", FORMS)
def test_tiny_and_huge_rows_keep_their_precision(form: str) -> None:
    weight, x = random(40, 64), random(1, 64)
    layer = NUMBA.quantize_linear(weight, None, form)
    for size in (2.0**-60, 2.0**60):
        assert torch.equal(layer(x * size), layer(x) * size)


def test_rows_of_x_may_be_views_of_wider_ones() -> None:
    x, layer = random(9, 300)[:, 11:230], NUMBA.quantize_linear(random(33, 256)[:, 30:249], None, "int4")
    assert torch.equal(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize(("form", "a_row"), [("int8", 576 + 18 * SCALE_BYTES), ("int4", 288 + 2 * 18 * SCALE_BYTES)])
def test_weights_are_kept_in_so_few_bits_only(form: str, a_row: int) -> None:
    layer = NUMBA.quantize_linear(random(1536, 576), None, form)
    assert layer.num_bytes == 1536 * a_row


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_are_summed_exactly(sign: int) -> None:
    weight = torch.full((40, 96), 127.0)
    weight[::2] = -127.0
    layer, x = NUMBA.quantize_linear(weight, None, "int8"), torch.full((2 * ROWS, 96), 127.0 * sign)
    assert torch.equal(layer(x), (x.double() @ weight.T.double()).float())


@pytest.mark.parametrize(
    ("features", "lanes"),
    [
        ("", 0),
        ("+avx2,+fma", 0),
        ("+avx512f,+avx512vnni", 16),
        ("+avx512f,-avx512vnni,+avxvnni", 8),
        ("+avx2,+avxvnni", 8),
        ("-avx512f,+avx512vnni", 0),
    ],
)
def test_bytes_are_multiplied_as_many_at_once_as_the_processor_can(features: str, lanes: int) -> None:
    assert dot_lanes(features) == lanes


_ELSEWHERE = """
import sys, numba, numpy as np, torch
from izh.kernels.cpu import linear_quantized, simd_integer
from izh.kernels.cpu.table import NUMBA
from izh.kernels.cpu.threads import choose_layer
from izh.kernels.quantized import FORMS
choose_layer()
saved = torch.load(sys.argv[1])
layers = [NUMBA.quantize_linear(saved["weight"], saved["bias"], form) for form in FORMS]
found = [layer(saved["x"]) for layer in layers]
x, out, threads = saved["wide"], torch.empty(len(saved["wide"]), 32), numba.get_num_threads()
layer = NUMBA.quantize_linear(saved["gates"], None, "int8")
gates = np.array(layer.fixed_arguments), x.data_ptr(), len(x), x.shape[1], out.data_ptr()
linear_quantized.linear_at(*gates, linear_quantized.SILU, threads)
same = torch.equal(out, NUMBA.silu_mul(layer(x)))
torch.save((simd_integer.dot_lanes(simd_integer.FEATURES), found, layer(x), same), sys.argv[1])
"""


@pytest.mark.parametrize(("without", "lanes"), [(("avx512",), 8), (("avx512", "avxvnni"), 0)])
def test_other_processors_give_the_same_numbers(without: tuple[str, ...], lanes: int, tmp_path: Path) -> None:
    features = get_host_cpu_features().split(",")
    if "+avxvnni" not in features:
        pytest.skip("a processor without VNNI, of which there is nothing to leave out")
    left = ",".join("-" + each[1:] if each[1:].startswith(without) else each for each in features)
    saved = {"weight": random(77, 130), "bias": random(77), "x": random(2 * ROWS + 1, 130)}
    saved |= {"gates": random(64, 1600), "wide": random(2 * ROWS + 1, 1600)}
    torch.save(saved, tmp_path / "saved.pt")
    environment = os.environ | {
        "NUMBA_CPU_NAME": "x86-64-v3",
        "NUMBA_CPU_FEATURES": left,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    subprocess.run([sys.executable, "-c", _ELSEWHERE, tmp_path / "saved.pt"], env=environment, check=True)
    used, found, wide, gates_are_the_ops = torch.load(tmp_path / "saved.pt")
    assert used == lanes
    assert torch.equal(wide, NUMBA.quantize_linear(saved["gates"], None, "int8")(saved["wide"]))
    assert gates_are_the_ops
    for form, out in zip(FORMS, found, strict=True):
        assert torch.equal(out, NUMBA.quantize_linear(saved["weight"], saved["bias"], form)(saved["x"]))


LAYER, X = NUMBA.quantize_linear(torch.ones(5, 8), None, "int8"), torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LAYER(X.double()), "x: torch.float64"),
        (lambda: LAYER(X[None]), "x: torch.float32"),
        (lambda: LAYER(torch.zeros(8, 2).T), "x: strides"),
        (lambda: LAYER(X[:, :7]), "x: rows of 7 for a weight of 8"),
        (lambda: NUMBA.quantize_linear(X.double(), None, "int8"), "weight: torch.float64"),
        (lambda: NUMBA.quantize_linear(X, torch.zeros(4), "int8"), "bias: 4 entries"),
        (lambda: NUMBA.quantize_linear(X, torch.zeros(4)[::2], "int4"), "bias: strides"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        make()
