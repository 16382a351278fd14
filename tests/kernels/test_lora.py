"""The definition of the low-rank correction, and the grouping of rows that all kernels share."""

import pytest
import torch
from lora_cases import MIXES, lora_case

import izh.kernels
from izh.kernels.lora import AdapterRows, grouped_lora
from izh.kernels.reference import REFERENCE


def test_rows_are_grouped_by_slot_and_keep_their_order_within() -> None:
    rows = AdapterRows.of([2, -1, 0, 2, 0, -1, 2])
    assert rows is not None
    assert rows.order.tolist() == [2, 4, 0, 3, 6]
    assert rows.slot_of_row.tolist() == [0, 0, 2, 2, 2]
    assert rows.starts.tolist() == [0, 2, 5]
    assert rows.slots.tolist() == [0, 2]
    assert rows.groups == ((0, 0, 2), (2, 2, 5))
    assert rows.longest == 3
    assert {tensor.dtype for tensor in (rows.order, rows.starts, rows.slots)} == {torch.int32}


def test_without_an_adapter_there_is_nothing_to_apply() -> None:
    assert AdapterRows.of([-1, -1]) is None
    assert AdapterRows.of([]) is None
    assert AdapterRows.of(torch.tensor([-1])) is None


@pytest.mark.parametrize("counts", [(1,), (16, 5), (33, 1), (64, 200)])
def test_tiles_cover_each_row_once_and_are_never_empty(counts: tuple[int, ...]) -> None:
    rows = AdapterRows.of([slot * 3 for slot, count in enumerate(counts) for _ in range(count)])
    assert rows is not None
    covered: list[int] = []
    for slot, start, stop in rows.tiles.tolist():
        assert 0 < stop - start <= rows.tile_rows
        assert rows.slot_of_row[start:stop].unique().tolist() == [slot]
        covered += range(start, stop)
    assert covered == list(range(sum(counts)))
    assert rows.tiles is rows.tiles  # made once, read by every layer


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_grouped_lora_row_by_row(mix: list[int]) -> None:
    case = lora_case(mix, width=17, offsets=(0, 11), ranks=[[5]] * 5)
    got = grouped_lora(case.x, case.a[:, 0], case.b, torch.tensor(mix))
    torch.testing.assert_close(got, case.expected() - case.y, rtol=2e-5, atol=2e-5)
    assert not got[torch.tensor(mix) < 0].any()


def test_grouped_lora_accumulates_half_precision_in_float32() -> None:
    x, a, b = torch.ones(1, 4096), torch.ones(1, 1, 4096) * 2**-12, torch.ones(1, 3, 1)
    got = grouped_lora(x.bfloat16(), a.bfloat16(), b.bfloat16(), torch.tensor([0]))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.float(), torch.ones(1, 3))


@pytest.mark.parametrize("mix", [mix for mix in MIXES.values() if max(mix) >= 0])
def test_the_reference_op_by_the_definition(mix: list[int]) -> None:
    case = lora_case(
        mix, width=19, offsets=(0, 7, 7, 20), ranks=[[4, 4, 4], [0, 3, 2], [1, 1, 1], [4, 0, 0], [0, 0, 0]]
    )
    y = case.y.clone()
    assert case.rows is not None
    REFERENCE.add_lora(y, case.x, case.a, case.b, case.offsets, case.ranks, case.rows)
    torch.testing.assert_close(y, case.expected(), rtol=2e-5, atol=2e-5)
    base = torch.tensor(mix) < 0
    assert torch.equal(y[base], case.y[base])


def test_the_public_names() -> None:
    assert izh.kernels.grouped_lora is grouped_lora
    assert {"grouped_lora", "bgmv", "sgmv"} <= set(dir(izh.kernels))
    with pytest.raises(AttributeError, match="has no attribute 'bgmm'"):
        _ = izh.kernels.bgmm
