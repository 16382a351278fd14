"""The op `add_lora` by Triton against its definition. What lies beyond real ranks is NaN, so that touching it shows."""

import pytest
import torch
from lora_cases import MIXES, LoraCase, lora_case

from izh.kernels.lora import AdapterRows
from izh.kernels.reference import REFERENCE
from izh.kernels.triton import lora
from izh.kernels.triton.table import TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = {"rtol": 2e-5, "atol": 2e-5}
WITH_ROWS = {name: mix for name, mix in MIXES.items() if max(mix) >= 0}
PATHS = {"by rows": [1, -1, 3, 0, 1, -1, 4, 1, 0, 2, -1, 3, 1], "by tiles": MIXES["skewed"]}
MIXED_RANKS = [[8, 16, 3], [1, 0, 64], [2, 5, 17], [33, 4, 7], [0, 0, 0]]


def run(case: LoraCase) -> torch.Tensor:
    y, x, a, b = (tensor.to(DEVICE, copy=True) for tensor in (case.y, case.x, case.a, case.b))
    rows = AdapterRows.of(case.slots, DEVICE)
    assert rows is not None
    TRITON.add_lora(y, x, a, b, case.offsets, case.ranks, rows)
    return y.cpu()


@pytest.mark.parametrize("mix", WITH_ROWS.values(), ids=WITH_ROWS.keys())
@pytest.mark.parametrize(("width", "offsets"), [(1, (0, 1, 8, 15)), (65, (0, 130, 130, 201)), (130, (0, 33, 66, 83))])
def test_three_parts_of_their_own_ranks(mix: list[int], width: int, offsets: tuple[int, ...]) -> None:
    case = lora_case(mix, width=width, offsets=offsets, ranks=MIXED_RANKS)
    y = run(case)
    torch.testing.assert_close(y, case.expected(), **EXACT)
    untouched = torch.tensor([slot < 0 or slot == 4 for slot in mix])
    assert torch.equal(y[untouched], case.y[untouched])


@pytest.mark.parametrize("mix", PATHS.values(), ids=PATHS.keys())
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("rank", [1, 15, 16, 17, 64, 70])
def test_one_and_two_parts_at_every_edge_of_a_block_of_ranks(mix: list[int], parts: int, rank: int) -> None:
    ranks = [[rank, 3][:parts], [5, rank][:parts], [0, 1][:parts], [1, 0][:parts], [2, 2][:parts]]
    case = lora_case(mix, width=40, offsets=(0, 37, 50)[: parts + 1], ranks=ranks)
    torch.testing.assert_close(run(case), case.expected(), **EXACT)


@pytest.mark.parametrize("longest", [lora.FEW, lora.FEW + 1, 33])
@pytest.mark.parametrize("width", [lora.SPAN, lora.SPAN + 1, 3 * lora.SPAN - 5])
def test_wide_inputs_are_cut_into_spans_on_every_path(longest: int, width: int) -> None:
    slots = [1] * longest + [-1, 0, 2]
    case = lora_case(slots, width=width, offsets=(0, 20, 31), ranks=[[4, 0], [16, 2], [17, 18]])
    torch.testing.assert_close(run(case), case.expected(), **EXACT)


@pytest.mark.parametrize("width", [1, 16, 576, 1536, 4096, 5000, 11008, 28672])
@pytest.mark.parametrize("block_k", [128, 256])
def test_spans_cover_the_width_without_an_empty_one(width: int, block_k: int) -> None:
    span, count = lora._spans(width, block_k)
    assert span % block_k == 0
    assert (count - 1) * span < width <= count * span
    assert 1 <= count <= lora.MOST_SPLITS


@pytest.mark.parametrize("counts", [(70, 1, 33), (64, 128, 0)])
def test_prompts_beside_single_rows(counts: tuple[int, ...]) -> None:
    slots = [slot for slot, count in enumerate(counts) for _ in range(count)]
    slots = [*slots[1::2], -1, 3, -1, *slots[::2]]
    case = lora_case(slots, width=30, offsets=(0, 24, 40), ranks=[[16, 3], [0, 8], [17, 0], [64, 5]])
    torch.testing.assert_close(run(case), case.expected(), **EXACT)


@pytest.mark.parametrize("mix", WITH_ROWS.values(), ids=WITH_ROWS.keys())
def test_agrees_with_the_reference_op(mix: list[int]) -> None:
    case = lora_case(
        mix, width=48, offsets=(0, 48, 64, 80), ranks=[[8, 8, 8], [16, 0, 16], [0, 0, 1], [2] * 3, [4] * 3]
    )
    y = case.y.clone()
    assert case.rows is not None
    REFERENCE.add_lora(y, case.x, case.a, case.b, case.offsets, case.ranks, case.rows)
    torch.testing.assert_close(run(case), y, **EXACT)


@pytest.mark.parametrize("mix", PATHS.values(), ids=PATHS.keys())
def test_rows_may_be_views_of_wider_ones(mix: list[int]) -> None:
    case = lora_case(mix, width=24, offsets=(0, 10, 30), ranks=[[8, 3]] * 5)
    n = len(mix)
    wide_x, wide_y = torch.full((n, 40), float("nan"), device=DEVICE), torch.full((n, 50), 7.0, device=DEVICE)
    wide_x[:, 3:27], wide_y[:, 11:41] = case.x, case.y
    rows = AdapterRows.of(mix, DEVICE)
    assert rows is not None
    a, b = case.a.to(DEVICE), case.b.to(DEVICE)
    TRITON.add_lora(wide_y[:, 11:41], wide_x[:, 3:27], a, b, case.offsets, case.ranks, rows)
    assert torch.equal(wide_y[:, 11:41].cpu(), run(case))
    assert (wide_y[:, :11] == 7.0).all()
    assert (wide_y[:, 41:] == 7.0).all()


def test_a_row_is_the_same_whatever_else_is_in_a_step_of_few_rows_per_slot() -> None:
    case = lora_case([1, -1, 0, 2, 2, 1, 0, 1], width=600, offsets=(0, 20, 33), ranks=[[16, 16], [16, 7], [5, 0]])
    together = run(case)
    for row in (0, 2, 3, 7):
        assert torch.equal(run(case.only([row]))[0], together[row]), f"row {row}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mix", PATHS.values(), ids=PATHS.keys())
def test_half_precision_is_summed_in_float32(dtype: torch.dtype, mix: list[int]) -> None:
    """The sum of 4096 ones; in half precision it would stop at 2048 or 256."""
    if dtype == torch.bfloat16 and lora.IS_INTERPRETED and max(map(mix.count, mix)) > lora.FEW:
        pytest.skip("Triton's interpreter takes bfloat16 operands of tl.dot for integers")
    x, a = torch.ones(len(mix), 4096, dtype=dtype, device=DEVICE), torch.ones(5, 1, 1, 4096, dtype=dtype, device=DEVICE)
    b, y = torch.ones(5, 3, 1, dtype=dtype, device=DEVICE), torch.zeros(len(mix), 3, dtype=dtype, device=DEVICE)
    rows = AdapterRows.of(mix, DEVICE)
    assert rows is not None
    TRITON.add_lora(y, x, a, b, (0, 3), torch.ones(5, 1, dtype=torch.int32), rows)
    assert y.dtype == dtype
    assert y.cpu().unique(dim=1).flatten().tolist() == [4096.0 if slot >= 0 else 0.0 for slot in mix]


def test_changed_ranks_are_seen_and_unchanged_ones_not_copied_again() -> None:
    """As a bank changes them: in place, in inference mode, one slot at a time."""
    case = lora_case([0, 1, 1], width=20, offsets=(0, 12), ranks=[[8], [4]])
    torch.testing.assert_close(run(case), case.expected(), **EXACT)
    before = lora._seen[case.ranks]
    run(case)
    assert lora._seen[case.ranks] is before
    with torch.inference_mode():
        case.ranks[0] = 0
        case.ranks[0, 0] = 3
        case.ranks[1] = 0
        torch.testing.assert_close(run(case), case.expected(), **EXACT)
        case.ranks[1, 0] = 4
    torch.testing.assert_close(run(case), case.expected(), **EXACT)


def test_ranks_made_in_inference_mode_are_read_every_time() -> None:
    with torch.inference_mode():
        case = lora_case([0, 1], width=20, offsets=(0, 12), ranks=[[8], [4]])
        run(case)
        case.ranks[0, 0] = 2
        torch.testing.assert_close(run(case), case.expected(), **EXACT)


def test_what_was_kept_for_ranks_goes_with_them() -> None:
    case = lora_case([0], width=8, offsets=(0, 8), ranks=[[8]])
    count = len(lora._seen)
    run(case)
    assert len(lora._seen) == count + 1
    del case
    assert len(lora._seen) == count


def test_a_projection_that_no_adapter_of_the_step_changes_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = lora_case([0, -1, 0, 2], width=8, offsets=(0, 4, 8), ranks=[[0, 0], [8, 8], [0, 0]])
    for name in ("shrink_rows", "expand_rows", "shrink_tiles", "expand_tiles"):
        monkeypatch.setattr(lora, name, None)
    assert torch.equal(run(case), case.y)
    with pytest.raises(TypeError, match="NoneType"):
        run(lora_case([1], width=8, offsets=(0, 4, 8), ranks=[[0, 0], [8, 8]]))


CASE = lora_case([0, 1, -1, 1], width=9, offsets=(0, 3, 6), ranks=[[2, 4], [4, 0]])
NAMES = ["y", "x", "a", "b", "offsets", "ranks", "rows"]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("y", CASE.y[:3], "y: "),
        ("y", CASE.y.T.contiguous().T, "y: .*strides"),
        ("x", CASE.x[:, :8], "a: width 9 for rows of x"),
        ("a", CASE.a[:, :, :3], "b: shape"),
        ("a", CASE.a.mT.contiguous().mT, "a: strides"),
        ("b", CASE.b.mT.contiguous().mT, "b: strides"),
        ("offsets", (0, 6), "offsets: .*do not cut 6 outputs into 2 parts"),
        ("offsets", (0, 7, 6), "offsets: "),
        ("offsets", (1, 3, 6), "offsets: "),
        ("ranks", CASE.ranks[:1], r"ranks: .*int32 \(2, 2\) on the host"),
        ("ranks", CASE.ranks.long(), "ranks: torch.int64"),
        ("ranks", CASE.ranks + 1, r"ranks: \[3, 5\] in slot 0, whose room is for 0 to 4"),
        ("ranks", CASE.ranks - 1, "ranks: .*in slot 1"),
        ("rows", AdapterRows.of([0, 1, 2], DEVICE), "rows: 3 up to slot 2, of 4 and 2"),
        ("rows", AdapterRows.of([0, 1, 0, 1, 1], DEVICE), "rows: 5 up to slot 1, of 4 and 2"),
        ("rows", AdapterRows.of([0, 1], "meta"), "rows: on meta"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, value: object, says: str) -> None:
    args = [CASE.y, CASE.x, CASE.a, CASE.b, CASE.offsets, CASE.ranks, AdapterRows.of(CASE.slots, DEVICE)]
    args[NAMES.index(name)] = value
    args = [arg.to(DEVICE) if isinstance(arg, torch.Tensor) and arg is not args[5] else arg for arg in args]
    before = args[0].clone()
    with pytest.raises(ValueError, match=f"^{says}"):
        TRITON.add_lora(*args)
    assert torch.equal(args[0], before)
