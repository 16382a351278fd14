"""Adapters on layers computed in one call: to the last bit what the modules give, whatever is written meanwhile."""

from dataclasses import replace

import harness
import pytest
import tiny
import torch
from transformers import LlamaConfig

from izh.adapters import AdapterBank
from izh.adapters.weights import Adapter, ModuleDelta
from izh.kernels.cpu.linear import PANEL
from izh.kernels.cpu.row_limits import RowLimits
from izh.kernels.cpu.table import with_rows
from izh.kernels.decoder import Corrections
from izh.model.load import load_decoder, load_spec
from izh.model.source import resolve

TARGETS = {"q_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn", "gate_proj": "mlp", "down_proj": "mlp"}
SLOTS = [0, -1, 1, 0, 2]  # of rows, over and over


def adapter(bank, seed, rank, targets, is_half=True):
    """Random weights for some targets of every layer; of numbers that float16 holds, or not."""
    random, deltas = torch.Generator().manual_seed(seed), {}
    for path, (inputs, outputs) in bank.shapes.items():
        if path.rpartition(".")[2] in targets:
            a, b = torch.randn(rank, inputs, generator=random), torch.randn(outputs, rank, generator=random)
            deltas[path] = ModuleDelta(*((a.half().float(), b.half().float()) if is_half else (a, b)))
    return bank.fit(Adapter(deltas))


@pytest.fixture
def world(tmp_path):
    """(decoder, bank): three adapters of different ranks and targets."""
    tiny.reference_model(LlamaConfig(**tiny.SIZES, mlp_bias=True)).save_pretrained(tmp_path)
    source = resolve(str(tmp_path))
    ops = with_rows(RowLimits(2 * PANEL, 2 * PANEL))
    decoder = load_decoder(source, load_spec(source), ops, "cpu", torch.float32, quiet=True)[0]
    decoder.join()
    bank = AdapterBank(decoder, capacity=4, max_rank=8, backend="cpu")
    for slot, (rank, targets) in enumerate([(8, TARGETS), (3, ["v_proj"]), (1, ["o_proj", "down_proj"])]):
        bank.write(slot, adapter(bank, slot, rank, targets))
    return decoder, bank


def rows_of(decoder, bank, joined, count):
    """What the step of a prompt's first `count` rows gives: in one call, or by the modules."""
    paged = harness.PagedDecoder(decoder)
    row = paged.add(tiny.prompt(count))
    batch = paged.batch([(row, 0, count)])
    bank.activate([SLOTS[i % len(SLOTS)] for i in range(count)])
    if not joined:
        rows = bank.corrections().rows
        decoder.corrections = lambda: Corrections(rows, None)
    try:
        return decoder(batch, paged.pages)
    finally:
        decoder.corrections = bank.corrections


def refuse(*args):
    raise AssertionError("the step went through the modules")


def assert_same(decoder, bank, monkeypatch):
    for count in (1, 5, PANEL, PANEL + 1):
        expected = rows_of(decoder, bank, False, count)
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "_one_by_one", refuse)
            assert torch.equal(rows_of(decoder, bank, True, count), expected)
        bank.activate([-1] * count)
    assert not torch.equal(expected, rows_of_base(decoder, count))


def rows_of_base(decoder, count):
    paged = harness.PagedDecoder(decoder)
    return decoder(paged.batch([(paged.add(tiny.prompt(count)), 0, count)]), paged.pages)


@torch.inference_mode()
def test_one_call_gives_what_the_modules_give(world, monkeypatch):
    decoder, bank = world
    assert_same(decoder, bank, monkeypatch)
    bank.write(1, adapter(bank, 7, 5, ["q_proj", "down_proj"]))  # in place of another
    assert_same(decoder, bank, monkeypatch)
    bank.write(3, adapter(bank, 8, 2, TARGETS, is_half=False))  # all become wide: A and B lie elsewhere
    assert_same(decoder, bank, monkeypatch)


@torch.inference_mode()
def test_what_is_known_of_a_step_holds_until_its_rows_or_a_slot_change(world):
    _, bank = world
    bank.activate([0, 1])
    found = bank.corrections()
    bank.activate([0, 1])
    assert bank.corrections() is found
    bank.activate([1, 0])
    assert bank.corrections() is not found
    found = bank.corrections()
    bank.write(3, adapter(bank, 9, 2, TARGETS))
    assert bank.corrections() is not found
    bank.activate([-1, -1])
    assert bank.corrections() is None


@torch.inference_mode()
def test_adapters_that_do_more_go_through_the_modules(world):
    _, bank = world
    plain = adapter(bank, 3, 2, ["q_proj"])
    path, delta = next(iter(plain.deltas.items()))
    more = replace(delta, magnitude=torch.full((delta.b.shape[0],), 2.0))
    bank.write(3, bank.fit(Adapter({**plain.deltas, path: more})))
    bank.activate([0, 3])
    assert bank.corrections().projections is None
    bank.activate([0, 1])
    assert bank.corrections().projections is not None


@torch.inference_mode()
def test_corrections_of_other_layers_and_rows_that_are_not_there_are_refused(world):
    decoder, bank = world
    bank.activate(SLOTS)
    paged = harness.PagedDecoder(decoder)
    batch = paged.batch([(paged.add(tiny.prompt(5)), 0, 5)])
    found = bank.corrections()
    for wrong, message in (
        (found.projections[:-1], "corrections: of 2 layers; these are 3"),
        (found.projections[::-1], "corrections: a LoraLinear in layer 0 is of another weight"),
    ):
        decoder.corrections = lambda wrong=wrong: replace(found, projections=wrong)
        with pytest.raises(ValueError, match=f"^{message}$"):
            decoder(batch, paged.pages)
    bank.activate([-1] * 5 + [2])
    decoder.corrections = bank.corrections
    with pytest.raises(ValueError, match=r"^corrections: rows \[5\] of 5 take slot 2: one of them"):
        decoder(batch, paged.pages)
