"""Identity, sums and the report of host-side weights."""

import pytest
import torch

from izh.adapters.weights import Adapter, ModuleDelta, combine


def delta(rank=2, seed=0, **more):
    torch.manual_seed(seed)
    return ModuleDelta(torch.randn(rank, 6), torch.randn(4, rank), **more)


def test_equal_effective_weights_have_one_digest():
    one = Adapter({"x": delta(), "y": delta(seed=1)}, {"x": 2.0, "y": 2.0})
    other = Adapter({"y": delta(seed=1), "x": delta()})
    assert one.digest == other.digest
    assert len(one.digest) == 32


@pytest.mark.parametrize(
    "changed",
    [
        {"x": delta(seed=1)},
        {"z": delta()},
        {"x": delta(), "y": delta()},
        {"x": delta(bias=torch.zeros(4))},
        {"x": delta(magnitude=torch.zeros(4))},
        {"x": delta(shift=torch.zeros(4))},
        {"x": delta(row_ids=torch.tensor([1]), rows=torch.zeros(1, 6))},
        {"x": ModuleDelta(delta().a, delta().b * 2)},
        {"x": ModuleDelta(delta().a.T.contiguous(), delta().b)},
        {"x": ModuleDelta(delta().a.bfloat16().float(), delta().b)},
    ],
)
def test_any_change_of_the_weights_changes_the_digest(changed):
    assert Adapter(changed).digest != Adapter({"x": delta()}).digest


def test_a_bias_is_no_magnitude():
    values = torch.ones(4)
    assert Adapter({"x": delta(bias=values)}).digest != Adapter({"x": delta(magnitude=values)}).digest


def test_other_rows_are_another_adapter():
    values = torch.ones(2, 6)
    one = Adapter({"x": delta(row_ids=torch.tensor([1, 2]), rows=values)})
    assert one.digest != Adapter({"x": delta(row_ids=torch.tensor([1, 3]), rows=values)}).digest
    assert one.digest == Adapter({"x": delta(row_ids=torch.tensor([1, 2]), rows=values.clone())}).digest


def test_size_and_rank():
    adapter = Adapter({"x": delta(2), "y": delta(3, bias=torch.zeros(4))})
    assert adapter.num_bytes == 4 * (2 * 10 + 3 * 10 + 4)
    assert adapter.rank == 3


def test_the_report_names_every_module_once_with_rank_and_scale():
    adapter = Adapter(
        {
            "layers.0.mlp.up_proj": delta(2),
            "layers.1.mlp.up_proj": delta(2),
            "layers.2.mlp.up_proj": delta(3),
            "lm_head": delta(1, magnitude=torch.ones(4)),
            "embed_tokens": delta(1, shift=torch.ones(4), row_ids=torch.tensor([1, 2]), rows=torch.ones(2, 6)),
            "layers.0.o_proj": ModuleDelta(torch.zeros(0, 6), torch.zeros(4, 0), bias=torch.ones(4)),
        },
        {"layers.0.mlp.up_proj": 0.5, "layers.1.mlp.up_proj": 0.5, "layers.2.mlp.up_proj": 0.5, "lm_head": 4.0},
    )
    assert adapter.report() == [
        "layers.*.mlp.up_proj: rank 2, scale 0.5 (layers 0-1)",
        "layers.*.mlp.up_proj: rank 3, scale 0.5 (layers 2)",
        "lm_head: rank 1, scale 4, magnitude",
        "embed_tokens: rank 1, shift, 2 rows replaced",
        "layers.*.o_proj: rank 0, bias (layers 0)",
    ]


def test_a_sum_is_the_sum_of_the_products():
    one, two = Adapter({"x": delta(2)}), Adapter({"x": delta(3, seed=1), "y": delta(1)})
    total = combine([(one, 0.5), (two, -2.0)])
    x = total.deltas["x"]
    expected = 0.5 * one.deltas["x"].b @ one.deltas["x"].a - 2.0 * two.deltas["x"].b @ two.deltas["x"].a
    torch.testing.assert_close(x.b @ x.a, expected)
    assert x.rank == 5
    assert total.deltas["y"].rank == 1
    assert combine([(one, 1.0)]) is one


def test_shifts_add_up_with_their_scales():
    one = Adapter({"x": delta(shift=torch.ones(4)), "y": delta()})
    two = Adapter({"x": delta(shift=torch.full((4,), 3.0)), "y": delta(shift=torch.ones(4))})
    total = combine([(one, 0.5), (two, 2.0)])
    assert torch.equal(total.deltas["x"].shift, torch.full((4,), 6.5))
    assert torch.equal(total.deltas["y"].shift, torch.full((4,), 2.0))
    assert combine([(Adapter({"y": delta()}), 2.0)]).deltas["y"].shift is None


@pytest.mark.parametrize(
    "more",
    [
        {"bias": torch.ones(4)},
        {"magnitude": torch.ones(4)},
        {"row_ids": torch.tensor([1]), "rows": torch.ones(1, 6)},
    ],
)
def test_what_has_no_sum_is_refused(more):
    with pytest.raises(ValueError, match="alone and at scale 1 only"):
        combine([(Adapter({"x": delta(**more)}), 0.5)])
