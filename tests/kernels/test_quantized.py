"""What 8 and 4 bits mean, against the words of `izh/kernels/quantized.py`."""

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from izh.kernels.quantized import FORMS, TOP, quantize_linear

INT8, INT4 = FORMS["int8"], FORMS["int4"]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
def test_8_bits_each_group_of_neighbours_has_a_scale_of_its_own(width: int) -> None:
    weight = random(7, width) * torch.logspace(-6, 6, width)
    codes, scales = INT8.quantize(weight)
    assert codes.shape == weight.shape
    assert scales.shape == (7, -(-width // INT8.group), 1)
    for n in range(7):
        for g, group in enumerate(weight[n].split(INT8.group)):
            assert scales[n, g] == group.abs().max() * (1 / 127)
            mine = codes[n, g * INT8.group :][: len(group)]
            assert mine.abs().max() == 127
            assert ((mine.float() * scales[n, g] - group).abs() <= scales[n, g] * 0.5001).all()
    expected = codes[3] * scales[3, :, 0].repeat_interleave(INT8.group)[:width]
    assert torch.equal(INT8.dequantize(codes, scales)[3], expected)


@pytest.mark.parametrize("width", [1, 31, 32, 33, 100])
def test_4_bits_each_group_of_neighbours_has_its_range(width: int) -> None:
    weight = random(7, width) * torch.logspace(-2, 4, width) + 3
    codes, scales = INT4.quantize(weight)
    assert codes.shape == weight.shape
    assert scales.shape == (7, -(-width // INT4.group), 2)
    assert codes.min() >= 0
    assert codes.max() <= 15
    found = INT4.dequantize(codes, scales)
    for n in range(7):
        for g, group in enumerate(weight[n].split(INT4.group)):
            s, m = scales[n, g]
            assert s == ((group.max() - group.min()) * (1 / 15)).half()
            assert m == group.min().half()
            mine = slice(g * INT4.group, g * INT4.group + len(group))
            assert torch.equal(found[n, mine], codes[n, mine] * s.float() + m.float())
            half_step = 0.5001 * s.float() + 2**-10 * group.abs().max()  # and what float16 rounds off s and m
            assert ((found[n, mine] - group).abs() <= half_step).all()


def test_4_bits_hold_what_comes_from_4_bits_as_it_is() -> None:
    kind = gguf.GGMLQuantizationType.Q4_1
    weight = gguf.dequantize(gguf.quantize(random(50, 320).numpy().astype(np.float32), kind), kind)
    assert torch.equal(INT4.dequantize(*INT4.quantize(torch.from_numpy(weight))), torch.from_numpy(weight))


def test_4_bits_of_equal_weights_and_of_some_that_float16_does_not_hold() -> None:
    assert torch.equal(INT4.dequantize(*INT4.quantize(torch.full((2, 40), 0.25))), torch.full((2, 40), 0.25))
    tiny = torch.full((1, 40), 1e-9)
    tiny[0, 3] = 0
    assert INT4.dequantize(*INT4.quantize(tiny)).abs().max() < 1e-7
    with pytest.raises(ValueError, match=r"^weight: 70000 is beyond what 4 bits hold, 65504; take 8"):
        INT4.quantize(torch.tensor([[0.0, -70000.0]]))


def test_nothing_can_exceed_32_bits_nor_what_float32_counts_exactly() -> None:
    assert INT8.group * 127 * TOP < 2**31
    assert INT4.group * 15 * TOP < 2**31
    assert INT4.group * TOP < 2**24


@pytest.mark.parametrize("form", FORMS)
def test_the_result_is_that_of_the_rounded_weight_to_16_bits_of_the_activations(form: str) -> None:
    weight, bias, x = random(9, 130), random(9), random(5, 130)
    layer = quantize_linear(weight, bias, form)
    rounded = layer.rows(torch.arange(9))
    exact = F.linear(x.double(), rounded.double(), bias.double())
    bound = (x.abs().amax(1) / TOP / 2)[:, None] * rounded.abs().sum(1)
    assert ((layer(x) - exact).abs() <= bound * 1.01).all()
    assert torch.equal(layer(x, "relu"), layer(x).relu())


@pytest.mark.parametrize(("form", "num_bytes"), [("int8", 9 * 130 + 9 * 3 * 4), ("int4", 9 * 130 + 9 * 5 * 4)])
def test_a_layer_knows_the_weight_it_is_made_of(form: str, num_bytes: int) -> None:
    weight = random(9, 130)
    layer = quantize_linear(weight, None, form)
    assert layer.holds(weight)
    assert layer.holds(weight + weight.abs().max() * 1e-9), "what few bits do not tell apart is the same"
    assert not layer.holds(weight.flip(0))
    assert layer.num_bytes == num_bytes
