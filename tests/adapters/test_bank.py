"""AdapterBank as a user of it by hand knows it: on a flat model, rows of any adapters in one forward."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from izh.adapters import AdapterBank
from izh.adapters.weights import Adapter, ModuleDelta
from izh.errors import AdapterError
from izh.kernels.cpu.table import NUMBA
from izh.kernels.lora import grouped_lora


class Flat(nn.Module):
    """Two linears over rows [N, 24]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(24, 40)
        self.v_proj = nn.Linear(24, 17, bias=False)
        self.other = nn.Linear(24, 8)

    def forward(self, x):
        return torch.cat([self.q_proj(x), self.v_proj(x), self.other(x)], dim=1)


def weights(seed, rank, targets=("q_proj", "v_proj")):
    torch.manual_seed(seed)
    outputs = {"q_proj": 40, "v_proj": 17}
    return {name: (torch.randn(rank, 24), torch.randn(outputs[name], rank)) for name in targets}


def by_hand(model, x, made, alpha):
    """W x + (alpha / r) B A x."""
    y = model(x)
    start = 0
    for name, width in (("q_proj", 40), ("v_proj", 17)):
        if name in made:
            a, b = made[name]
            y[:, start : start + width] += (alpha / a.shape[0]) * (x @ a.T @ b.T)
        start += width
    return y


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@torch.inference_mode()
def test_each_row_gets_its_own_adapter_and_base_rows_are_untouched(backend):
    plain, model = Flat(), Flat()
    bank = AdapterBank(model, capacity=3, max_rank=8, backend=backend)
    one, two = weights(1, 8), weights(2, 3, ("v_proj",))
    slots = [bank.load("one", one, alpha=16), bank.load("two", two, alpha=3)]
    x = torch.randn(11, 24)
    rows = torch.tensor([0, -1, 1, 1, 0, -1, 0, 1, -1, 0, 0])
    assert slots == [0, 1]
    bank.activate(rows, decode=True)
    y = model(x)
    for slot, made, alpha in ((0, one, 16), (1, two, 3)):
        expected = by_hand(plain, x, made, alpha)
        assert torch.allclose(y[rows == slot], expected[rows == slot], atol=2e-5)
    bank.activate([-1] * 11)
    assert torch.equal(model(x), plain(x))
    assert torch.allclose(y[rows == -1], plain(x)[rows == -1], atol=1e-6)


@pytest.mark.skipif(not NUMBA.lora_half, reason="this processor does not widen float16 itself")
@torch.inference_mode()
def test_weights_are_kept_in_half_precision_while_that_is_exact():
    plain, model = Flat(), Flat()
    bank = AdapterBank(model, capacity=3, max_rank=4, backend="cpu")
    halves = {name: (a.half().float(), b.half().float()) for name, (a, b) in weights(1, 4).items()}
    bank.load("halves", halves, alpha=8)
    x = torch.randn(5, 24)
    bank.activate([0] * 5)
    first = model(x)
    assert torch.allclose(first, by_hand(plain, x, halves, 8), atol=2e-5)
    assert model.q_proj.a.dtype is model.q_proj.b.dtype is model.v_proj.b.dtype is torch.float16

    more = weights(2, 4, ("q_proj",))  # float32 that float16 does not hold: only where it came, all is wide
    bank.load("more", more, alpha=4)
    assert model.q_proj.a.dtype is model.q_proj.b.dtype is torch.float32
    assert model.v_proj.a.dtype is torch.float16
    bank.load("largest", {"v_proj": (torch.full((1, 24), 65520.0), torch.ones(17, 1))}, alpha=1)
    assert model.v_proj.b.dtype is torch.float32
    assert torch.equal(model(x), first)
    bank.activate([1] * 5)
    assert torch.allclose(model(x), by_hand(plain, x, more, 4), atol=2e-5)


def test_grouped_lora_is_the_definition():
    torch.manual_seed(0)
    x, a, b = torch.randn(6, 5), torch.randn(2, 3, 5), torch.randn(2, 7, 3)
    slots = torch.tensor([1, -1, 0, 1, -1, 0])
    y = grouped_lora(x, a, b, slots)
    for i, slot in enumerate(slots.tolist()):
        expected = torch.zeros(7) if slot < 0 else b[slot] @ (a[slot] @ x[i])
        assert torch.allclose(y[i], expected, atol=1e-5)
    assert not y[slots < 0].any()


def test_a_failed_load_changes_nothing():
    model = Flat()
    bank = AdapterBank(model, capacity=2, max_rank=4)
    bank.load("good", weights(1, 4), alpha=4)
    x = torch.randn(3, 24)
    bank.activate([0, 0, 0])
    before = model(x)
    good = weights(2, 4)
    bad = {
        "rank 5, at most 4": weights(3, 5),
        "nowhere cannot be adapted": {"nowhere": good["q_proj"]},
        r"other cannot be adapted": {"other": (torch.zeros(2, 24), torch.zeros(8, 2))},
        r"needs A \[r, 24\]": {"q_proj": (torch.zeros(2, 23), torch.zeros(40, 2))},
        r"and B \[40, r\]": {"q_proj": (torch.zeros(2, 24), torch.zeros(41, 2))},
        "not finite": {"q_proj": (torch.full((2, 24), torch.inf), torch.zeros(40, 2))},
        "no weights": {},
    }
    for text, made in bad.items():
        with pytest.raises(AdapterError, match=text):
            bank.load("bad", made, alpha=1)
    assert torch.equal(model(x), before)
    assert bank.load("good2", good, alpha=4) == 1


def test_a_trained_bias_needs_a_linear_with_a_bias():
    bank = AdapterBank(Flat(), capacity=1, max_rank=4)
    delta = ModuleDelta(torch.zeros(0, 24), torch.zeros(17, 0), bias=torch.ones(17))
    with pytest.raises(AdapterError, match="v_proj: the adapter trains a bias, but the model's linear has none"):
        bank.check(Adapter({"v_proj": delta}))
    bank.check(Adapter({"q_proj": ModuleDelta(torch.zeros(0, 24), torch.zeros(40, 0), bias=torch.ones(40))}))


def test_leases_guard_slots():
    bank = AdapterBank(Flat(), capacity=2, max_rank=4)
    bank.load("one", weights(1, 4), alpha=4)
    slot, identity = bank.acquire("one")
    assert identity[0] == "lora"
    with pytest.raises(AdapterError, match="in use by 1 requests; it cannot be unloaded"):
        bank.unload("one")
    with pytest.raises(AdapterError, match="in use by 1 requests; it cannot be replaced"):
        bank.load("one", weights(2, 4), alpha=4)
    bank.load("two", weights(2, 4), alpha=4)
    with pytest.raises(AdapterError, match="all 2 adapter slots are taken"):
        bank.load("three", weights(3, 4), alpha=4)
    bank.release(slot)
    with pytest.raises(RuntimeError, match="released more often"):
        bank.release(slot)
    bank.load("one", weights(3, 4), alpha=4)
    assert bank.acquire("one")[1] != identity
    bank.unload("two")
    with pytest.raises(AdapterError, match="no adapter 'two' is loaded; loaded: one"):
        bank.acquire("two")


def test_equal_weights_share_a_slot_and_an_identity():
    bank = AdapterBank(Flat(), capacity=2, max_rank=4)
    bank.load("one", weights(1, 4), alpha=4)
    bank.load("twin", weights(1, 4), alpha=4)
    bank.load("stronger", weights(1, 4), alpha=8)
    assert bank.acquire("one") == bank.acquire("twin")
    assert bank.acquire("stronger")[1] != bank.acquire("one")[1]


def test_a_model_has_one_bank():
    model = Flat()
    AdapterBank(model)
    with pytest.raises(ValueError, match="no linear named"):
        AdapterBank(model)


@pytest.mark.parametrize("num_rows", [3, 200])  # as few and as many rows are computed
@torch.inference_mode()
def test_a_projection_that_no_adapter_of_the_step_adapts_is_the_base_alone(num_rows):
    """And is none any more once its slot has an adapter that does."""
    model = Flat()
    bank = AdapterBank(model, capacity=2, max_rank=4, backend="cpu")
    calls = []
    wrapped = model.v_proj
    bank.load("one", weights(1, 4, ("q_proj",)), alpha=4)
    bank.load("two", weights(2, 4, ("v_proj",)), alpha=4)
    wrapped.at_once = lambda x, rows: calls.append("at once") or wrapped.base(x)
    wrapped._ops = replace(wrapped._ops, add_lora=lambda *args: calls.append("after"))
    x = torch.randn(num_rows, 24)
    expected = ["at once"] if num_rows == 3 else ["after"]
    for slots, names in (([0, -1, 0], []), ([0, 1, -1], expected)):
        bank.activate((slots * num_rows)[:num_rows])
        assert torch.equal(model.v_proj(x), wrapped.base(x))
        assert calls == names
    bank.unload("one")
    assert bank.load("three", weights(3, 4, ("v_proj",)), alpha=4) == 0
    bank.activate([0] * num_rows)
    model.v_proj(x)
    assert calls == expected * 2


@torch.inference_mode()
def test_a_step_whose_rows_are_as_before_is_told_apart_from_one_whose_are_not():
    """The grouping of rows is kept from step to step."""
    model, x = Flat(), torch.randn(2, 24)
    bank = AdapterBank(model, capacity=2, max_rank=4, backend="cpu")
    bank.load("one", weights(1, 4), alpha=4)
    bank.load("two", weights(2, 4), alpha=4)
    rows = [0, 1]
    bank.activate(rows)
    first = model(x)
    rows.reverse()  # the caller's list may change
    bank.activate(rows)
    second = model(x)
    bank.activate(torch.tensor([0, 1]))
    assert torch.equal(model(x), first)
    bank.activate([-1, -1])
    base = model(x)
    assert not torch.equal(first, second)
    assert not torch.equal(base, first)
    assert torch.equal(model(x.flip(0)).flip(0), base)
