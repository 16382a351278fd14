"""What 8 bits mean, against the words of `izh/kernels/int8.py`."""

import pytest
import torch
import torch.nn.functional as F

from izh.kernels import int8


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
def test_each_group_of_neighbours_has_a_scale_of_its_own(width: int) -> None:
    weight = random(7, width) * torch.logspace(-6, 6, width)
    codes, scales = int8.quantize_weight(weight)
    assert codes.shape == weight.shape
    assert scales.shape == (7, -(-width // int8.GROUP))
    for n in range(7):
        for g, group in enumerate(weight[n].split(int8.GROUP)):
            assert scales[n, g] == group.abs().max() * (1 / 127)
            mine = codes[n, g * int8.GROUP :][: len(group)]
            assert mine.abs().max() == 127
            assert ((mine.float() * scales[n, g] - group).abs() <= scales[n, g] * 0.5001).all()
    assert torch.equal(int8.dequantize(codes, scales)[3], codes[3] * scales[3].repeat_interleave(int8.GROUP)[:width])


def test_nothing_can_exceed_32_bits() -> None:
    assert int8.GROUP * 127 * int8.TOP < 2**31


def test_the_result_is_that_of_the_rounded_weight_to_16_bits_of_the_activations() -> None:
    weight, bias, x = random(9, 130), random(9), random(5, 130)
    layer = int8.quantize_linear(weight, bias)
    rounded = layer.rows(torch.arange(9))
    exact = F.linear(x.double(), rounded.double(), bias.double())
    bound = (x.abs().amax(1) / int8.TOP / 2)[:, None] * rounded.abs().sum(1)
    assert ((layer(x) - exact).abs() <= bound * 1.01).all()
    assert torch.equal(layer(x, "relu"), layer(x).relu())


def test_a_layer_knows_the_weight_it_is_made_of() -> None:
    weight = random(9, 130)
    layer = int8.quantize_linear(weight, None)
    assert layer.holds(weight)
    assert layer.holds(weight + weight.abs().max() * 1e-9), "what 8 bits do not tell apart is the same"
    assert not layer.holds(weight.flip(0))
    assert layer.num_bytes == 9 * 130 + 9 * 3 * 4
