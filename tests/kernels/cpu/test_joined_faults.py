"""What the layers in one call refuse, by name, before they touch memory that is not theirs."""

from dataclasses import replace

import pytest
import torch

from izh.kernels.cpu.table import NUMBA
from izh.kernels.decoder import DecoderSizes, LayerWeights

SIZES = DecoderSizes(
    num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=6, eps=1e-5, scale=0.5, activation="silu"
)
NORM = torch.ones(8)
LAYER = LayerWeights(
    input_norm=NORM,
    qkv=(torch.zeros(16, 8), None),
    q_norm=None,
    k_norm=None,
    o=(torch.zeros(8, 8), None),
    post_attention_norm=None,
    mlp_norm=NORM,
    gate_up=(torch.zeros(12, 8), None),
    down=(torch.zeros(8, 6), None),
    post_mlp_norm=None,
    rope=0,
    window=None,
)
PAGE = torch.zeros(3, 1, 4, 4)
STEP = {
    "residual": torch.zeros(2, 8),
    "rotary": [(torch.ones(2, 2), torch.zeros(2, 2))],
    "pages": [(PAGE, PAGE)],
    "query_starts": torch.tensor([0, 2], dtype=torch.int32),
    "context_lens": torch.tensor([2], dtype=torch.int32),
    "block_table": torch.tensor([[1]], dtype=torch.int32),
    "write_slots": torch.tensor([4, 5]),
    "corrections": None,
}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"residual": torch.zeros(2, 9)}, "residual: rows of 9 for layers of 8"),
        ({"residual": torch.zeros(2, 16)[:, ::2]}, "residual: strides"),
        ({"rotary": []}, "rotary: 0 recipes"),
        ({"rotary": [(torch.ones(2, 3), torch.zeros(2, 3))]}, r"cos: shape \(2, 3\) for 2 rows of heads 4 wide"),
        ({"rotary": [(torch.ones(1, 2), torch.zeros(1, 2))]}, r"cos: shape \(1, 2\) for 2 rows"),
        ({"rotary": [(torch.ones(2, 2), torch.zeros(2, 1))]}, r"sin: shape \(2, 1\) differs"),
        ({"pages": []}, "pages: 0 layers"),
        ({"pages": [(PAGE, PAGE[:2])]}, "pages: shapes"),
        ({"pages": [(PAGE[..., :2].contiguous(), PAGE[..., :2].contiguous())]}, "pages: 1 layers of"),
        ({"query_starts": STEP["query_starts"][:1]}, "query_starts: 1 entries"),
        ({"query_starts": torch.tensor([0, 3], dtype=torch.int32)}, r"query_starts: \[0, 3\]"),
        ({"context_lens": torch.tensor([1], dtype=torch.int32)}, "context_lens: 1 keys"),
        ({"block_table": torch.tensor([[3]], dtype=torch.int32)}, "block_table: sequence 0 names a block outside"),
        ({"write_slots": torch.tensor([4, 12])}, "write_slots: row 1 has slot 12, but the pages hold 12"),
        ({"write_slots": torch.tensor([4])}, "write_slots: 1 entries"),
    ],
)
def test_a_step_that_does_not_fit(wrong, message):
    layers = NUMBA.join_layers([LAYER], SIZES)
    layers(**{**STEP, "residual": STEP["residual"].clone()})
    with pytest.raises(ValueError, match=f"^{message}"):
        layers(**{**STEP, **wrong})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mlp_norm": NORM[:7]}, "mlp_norm: 7 entries for rows of 8"),
        ({"down": (torch.zeros(8, 7), None)}, r"down: 7 -> 8; the sizes say 6 -> 8"),
        ({"qkv": (torch.zeros(15, 8), None)}, r"qkv: 8 -> 15; the sizes say 8 -> 16"),
        ({"o": (torch.zeros(8, 8, dtype=torch.float64), None)}, "weight: torch.float64"),
        ({"q_norm": NORM[:4]}, "q_norm, k_norm: one of them is None"),
    ],
)
def test_weights_that_do_not_fit(wrong, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        NUMBA.join_layers([replace(LAYER, **wrong)], SIZES)
