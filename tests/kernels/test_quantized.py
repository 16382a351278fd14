"""What 8 and 4 bits mean, against the words of `izh/kernels/quantized.py`."""

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from izh.kernels.quantized import FORMS, GROUP, TOP, Form, quantize_linear

INT8, INT4 = FORMS["int8"], FORMS["int4"]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("width", [1, 31, 32, 33, 200])
def test_8_bits_each_group_of_neighbours_has_a_scale_of_its_own(width: int) -> None:
    weight = random(7, width) * torch.logspace(0, 6, width)
    codes, scales = INT8.quantize(weight)
    assert codes.shape == weight.shape
    assert scales.shape == (7, -(-width // GROUP), 1)
    for n in range(7):
        for g, group in enumerate(weight[n].split(GROUP)):
            assert scales[n, g] == (group.abs().max() * (1 / 127)).half()
            mine = codes[n, g * GROUP :][: len(group)]
            assert mine.abs().max() == 127
            half_step = 0.5001 * scales[n, g].float() + 2**-11 * group.abs().max()  # and what float16 rounds off s
            assert ((mine.float() * scales[n, g].float() - group).abs() <= half_step).all()
    expected = codes[3] * scales[3, :, 0].float().repeat_interleave(GROUP)[:width]
    assert torch.equal(INT8.dequantize(codes, scales)[3], expected)


@pytest.mark.parametrize("width", [1, 31, 32, 33, 100])
def test_4_bits_each_group_of_neighbours_has_its_range(width: int) -> None:
    weight = random(7, width) * torch.logspace(-2, 4, width) + 3
    codes, scales = INT4.quantize(weight)
    assert codes.shape == weight.shape
    assert scales.shape == (7, -(-width // GROUP), 2)
    assert codes.min() >= 0
    assert codes.max() <= 15
    found = INT4.dequantize(codes, scales)
    for n in range(7):
        for g, group in enumerate(weight[n].split(GROUP)):
            s, m = scales[n, g]
            assert s == ((group.max() - group.min()) * (1 / 15)).half()
            assert m == group.min().half()
            mine = slice(g * GROUP, g * GROUP + len(group))
            assert torch.equal(found[n, mine], codes[n, mine] * s.float() + m.float())
            half_step = 0.5001 * s.float() + 2**-10 * group.abs().max()  # and what float16 rounds off s and m
            assert ((found[n, mine] - group).abs() <= half_step).all()


@pytest.mark.parametrize(("form", "kind"), [(INT8, "Q8_0"), (INT4, "Q4_1")])
def test_what_comes_from_as_few_bits_is_held_as_it_is(form: Form, kind: str) -> None:
    of_gguf = gguf.GGMLQuantizationType[kind]
    sizes = np.logspace(-3, 3, 50, dtype=np.float32)[:, None]
    weight = gguf.dequantize(gguf.quantize(random(50, 320).numpy() * sizes, of_gguf), of_gguf)
    assert torch.equal(form.dequantize(*form.quantize(torch.from_numpy(weight))), torch.from_numpy(weight))


def test_4_bits_of_equal_weights_and_of_some_that_float16_does_not_hold() -> None:
    assert torch.equal(INT4.dequantize(*INT4.quantize(torch.full((2, 40), 0.25))), torch.full((2, 40), 0.25))
    tiny = torch.full((1, 40), 1e-9)
    tiny[0, 3] = 0
    assert INT4.dequantize(*INT4.quantize(tiny)).abs().max() < 1e-7
    with pytest.raises(ValueError, match=r"^weight: 70000 is beyond what int4 holds, 65504; take int8$"):
        INT4.quantize(torch.tensor([[0.0, -70000.0]]))


def test_8_bits_of_zeros_and_of_some_that_float16_does_not_hold() -> None:
    assert torch.equal(INT8.dequantize(*INT8.quantize(torch.zeros(2, 40))), torch.zeros(2, 40))
    assert INT8.dequantize(*INT8.quantize(torch.full((1, 40), 1e-7))).abs().max() <= 1e-7
    with pytest.raises(ValueError, match=r"^weight: 1e\+07 is beyond what int8 holds, 8\.319e\+06; take float32$"):
        INT8.quantize(torch.tensor([[0.0, -1e7]]))


def test_no_sum_can_exceed_what_float32_counts_exactly() -> None:
    assert GROUP * 127 * TOP < 2**24
    assert GROUP * (127 + 128) * TOP < 2**24, "of 8 bits without a sign"


@pytest.mark.parametrize("form", FORMS)
def test_the_result_is_that_of_the_rounded_weight_to_the_digits_of_each_group_of_activations(form: str) -> None:
    weight, bias, x = random(9, 130), random(9), random(5, 130) * torch.logspace(-3, 3, 130)
    layer = quantize_linear(weight, bias, form)
    rounded = layer.rows(torch.arange(9))
    exact = F.linear(x.double(), rounded.double(), bias.double())
    step = (2 * TOP) ** FORMS[form].digits  # the second digit rounds what the first left, half of its step at most
    bound = sum(
        (part.abs().amax(1) / step)[:, None] * mine.abs().sum(1)
        for part, mine in zip(x.split(GROUP, 1), rounded.split(GROUP, 1), strict=True)
    )
    assert ((layer(x) - exact).abs() <= bound * 1.01 + exact.abs().max() * 1e-6).all()
    assert torch.equal(layer(x, "relu"), layer(x).relu())


@pytest.mark.parametrize(("form", "num_bytes"), [("int8", 9 * 130 + 9 * 5 * 2), ("int4", 9 * 130 + 9 * 5 * 4)])
def test_a_layer_knows_the_weight_it_is_made_of(form: str, num_bytes: int) -> None:
    weight = random(9, 130)
    layer = quantize_linear(weight, None, form)
    assert layer.holds(weight)
    assert layer.holds(weight + weight.abs().max() * 1e-9), "what few bits do not tell apart is the same"
    assert not layer.holds(weight.flip(0))
    assert layer.num_bytes == num_bytes
