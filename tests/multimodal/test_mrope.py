"""M-RoPE: bit for bit ordinary RoPE on equal coordinates, and bit for bit transformers' on others."""

import pytest
import torch
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from izh.model.rope import Mrope, Rotary
from izh.model.spec import RopeSpec
from izh.multimodal import mrope_cos_sin

THETA = 10_000.0
QWEN2_VL, QWEN3_VL = (16, 24, 24), (24, 20, 20)


def positions(count=37, high=3000):
    return torch.randint(0, high, (3, count), generator=torch.Generator().manual_seed(0))


def reference(interleaved, head_dim, sections):
    config_class, rotary_class = (
        (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding) if interleaved else (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding)
    )
    parameters = {"rope_type": "default", "rope_theta": THETA, "mrope_section": list(sections)}
    config = config_class(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=head_dim,
        rope_parameters=parameters,
    )
    return rotary_class(config)


@pytest.mark.parametrize(
    ("interleaved", "sections"),
    [
        (False, QWEN2_VL),
        (False, (64, 0, 0)),
        (False, (1, 2, 61)),
        (True, QWEN3_VL),
        (True, (22, 21, 21)),
        (True, (63, 1, 0)),
    ],
)
def test_cos_and_sin_are_the_references_own(interleaved, sections):
    where = positions()
    theirs = reference(interleaved, 128, sections)(torch.zeros(1), where[:, None])
    ours = mrope_cos_sin(where, 128, THETA, sections, torch.float32, interleaved=interleaved)
    for our, their in zip(ours, theirs, strict=True):
        assert our.shape == (37, 64)
        assert torch.equal(torch.cat([our, our], -1), their[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 31, 64])
def test_equal_coordinates_are_ordinary_rope_bit_for_bit(interleaved, count):
    where = positions(count)[0]
    plain = Rotary(RopeSpec(type="default", theta=THETA, rotary_dim=16, max_position_embeddings=64), "cpu")
    expected = plain.cos_sin(where, where + 1)
    got = mrope_cos_sin(where.expand(3, -1), 16, THETA, (4, 2, 2), torch.float32, interleaved=interleaved)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_each_section_follows_its_own_axis():
    base = positions(5)
    cos, _ = mrope_cos_sin(base, 16, THETA, (2, 3, 3), torch.float32)
    for axis, pairs in enumerate(([0, 1], [2, 3, 4], [5, 6, 7])):
        moved = base.clone()
        moved[axis] += 1
        changed = (mrope_cos_sin(moved, 16, 2.0, (2, 3, 3))[0] != mrope_cos_sin(base, 16, 2.0, (2, 3, 3))[0]).any(0)
        assert changed.nonzero().flatten().tolist() == pairs
    assert cos.shape == (5, 8)


def test_dtype_is_a_rounding_of_float32():
    for dtype in (torch.bfloat16, torch.float16):
        got = mrope_cos_sin(positions(), 16, THETA, (2, 3, 3), dtype)
        full = mrope_cos_sin(positions(), 16, THETA, (2, 3, 3), torch.float32)
        assert all(torch.equal(a, b.to(dtype)) for a, b in zip(got, full, strict=True))


@pytest.mark.parametrize("sections", [(2, 3, 4), (2, 3, 2), (4, 4), (10, -1, -1)])
def test_sections_that_do_not_fill_the_head_are_refused(sections):
    with pytest.raises(ValueError, match="sections must be 3 counts of frequency pairs with the sum 8"):
        mrope_cos_sin(positions(), 16, THETA, sections, torch.float32)


def test_sections_that_cannot_be_interleaved_are_refused():
    """Every third of 8 pairs, from 2 on, are only 2: transformers would silently turn the third with time."""
    with pytest.raises(ValueError, match="cannot be interleaved"):
        mrope_cos_sin(positions(), 16, THETA, (2, 3, 3), torch.float32, interleaved=True)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2, 5, dtype=torch.long), torch.zeros(5, dtype=torch.long), torch.zeros(3, 5)]
)
def test_positions_are_integers_on_three_axes(wrong):
    with pytest.raises(ValueError, match=r"integers \[3, N\]"):
        mrope_cos_sin(wrong, 16, THETA, (2, 3, 3), torch.float32)


@pytest.mark.parametrize("rope_type", ["dynamic", "yarn"])
def test_a_checkpoints_own_combination_with_scaling_keeps_each_rows_frequencies(rope_type):
    """Rotary itself combines the two; who may ask for it is the gate's matter."""
    spec = RopeSpec(
        type=rope_type,
        theta=THETA,
        rotary_dim=16,
        max_position_embeddings=32,
        factor=4.0,
        original_max_position_embeddings=32 if rope_type == "yarn" else None,
    )
    rotary = Rotary(spec, "cpu")
    rotary.set_mrope(Mrope((2, 3, 3)))
    where, lens = positions(6, 100), torch.tensor([5, 40, 90, 100, 20, 33])
    got = rotary.cos_sin(where, lens)
    per_axis = [rotary.cos_sin(where[axis], lens) for axis in range(3)]
    for part in range(2):
        expected = torch.cat([per_axis[0][part][:, :2], per_axis[1][part][:, 2:5], per_axis[2][part][:, 5:]], -1)
        torch.testing.assert_close(got[part], expected, atol=1e-6, rtol=0)
