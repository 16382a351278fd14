import dataclasses

import numba
import pytest
import torch
from lora_cases import MIXES, LoraCase, lora_case

from izh.kernels.cpu import lora, simd
from izh.kernels.cpu.linear import DEPTH, PANEL, linear
from izh.kernels.cpu.lora_add import ROWS
from izh.kernels.cpu.table import NUMBA, warm_up
from izh.kernels.cpu.threads import choose_layer
from izh.kernels.lora import AdapterRows, lora_room
from izh.kernels.reference import REFERENCE

choose_layer()

EXACT = {"rtol": 2e-5, "atol": 2e-5}
WITH_ROWS = {name: mix for name, mix in MIXES.items() if max(mix) >= 0}
MIXED_RANKS = [[8, 16, 3], [1, 0, 64], [2, 5, 7], [12, 4, 33], [0, 0, 0]]


def by_rank(b: torch.Tensor) -> torch.Tensor:
    """The same numbers, as they lie for these kernels."""
    num_slots, outputs, max_rank = b.shape
    return lora_room(b.new_zeros(outputs, 1), num_slots, max_rank, NUMBA.lora_b_by_rank).copy_(b)


def run(case: LoraCase) -> torch.Tensor:
    assert case.rows is not None
    y = case.y.clone()
    NUMBA.add_lora(y, case.x, case.a, by_rank(case.b), case.offsets, case.ranks, case.rows)
    return y


def run_at_once(case: LoraCase, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    assert case.rows is not None
    layer = lora.LoraLinear(weight, bias, case.a, by_rank(case.b), case.offsets, case.ranks)
    return layer(case.x, case.rows)


def one_after_the_other(case: LoraCase, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return run(dataclasses.replace(case, y=linear(case.x, weight, bias)))


@pytest.mark.parametrize("mix", WITH_ROWS.values(), ids=WITH_ROWS.keys())
@pytest.mark.parametrize("width", [1, 7, 8, 65, 576])
@pytest.mark.parametrize("offsets", [(0, 1, 8, 15), (0, 64, 64, 201), (0, 576, 768, 960)])
def test_agrees_with_the_definition(mix: list[int], width: int, offsets: tuple[int, ...]) -> None:
    case = lora_case(mix, width=width, offsets=offsets, ranks=MIXED_RANKS)
    y = run(case)
    torch.testing.assert_close(y, case.expected(), **EXACT)
    base = torch.tensor(mix) < 0
    assert torch.equal(y[base], case.y[base])


@pytest.mark.parametrize("rank", [*range(1, 18), 31, 32, 64])
def test_every_rank(rank: int) -> None:
    case = lora_case([0, 1, 0, 1, 1, 1, 1, 1], width=40, offsets=(0, 37), ranks=[[rank], [rank]])
    torch.testing.assert_close(run(case), case.expected(), **EXACT)


@pytest.mark.parametrize(("num_slots", "each"), [(64, 1), (64, 3), (1, 64), (1, 1), (2, 40)])
def test_from_one_adapter_to_sixty_four(num_slots: int, each: int) -> None:
    slots = [(7 * i) % num_slots for i in range(num_slots * each)]
    case = lora_case(slots, width=576, offsets=(0, 300, 700), ranks=[[s % 9, 16] for s in range(num_slots)])
    torch.testing.assert_close(run(case), case.expected(), **EXACT)


def test_long_prompts_beside_single_rows() -> None:
    """More rows than a block has, adjoining and scattered, one row, and the base, in one step."""
    n = 3 * ROWS + 5
    slots = [3, -1, *[0] * n, 2, *[1, -1] * n, 2, 3]
    for ranks in ([16, 16], [16, 4], [0, 16], [0, 0]):
        case = lora_case(slots, width=72, offsets=(0, 24, 240), ranks=[ranks, [8, 8], [16, 3], [1, 16]])
        y = run(case)
        torch.testing.assert_close(y, case.expected(), **EXACT)
        base = torch.tensor(slots) < 0
        assert torch.equal(y[base], case.y[base])


def test_a_row_is_the_same_whatever_else_is_in_the_step() -> None:
    slots = [1, -1, 0, *[2] * 90, 1, 1, 1, 3, 0, *[1, 3] * 40]
    case = lora_case(slots, width=100, offsets=(0, 70, 133), ranks=[[16, 16], [16, 7], [8, 16], [5, 0]])
    together = run(case)
    for row in range(0, len(slots), 3):
        if slots[row] >= 0:
            assert torch.equal(run(case.only([row]))[0], together[row]), f"row {row}"


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 40])
def test_a_row_is_the_same_on_any_number_of_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are cut for each number of threads anew: at parts that are no multiple of a vector, and beside one
    without any rank."""
    offsets = (0, 300, 309, 609, 1000)
    case = lora_case(
        [*[0] * 30, *[1] * 2, -1], width=100, offsets=offsets, ranks=[[16, 3, 13, 16], [16, 0, 16, 16], [0, 0, 0, 0]]
    )
    weight, bias = torch.randn(1000, 100), torch.randn(1000)
    alone, at_once = run(case), run_at_once(case, weight, bias)
    monkeypatch.setattr(numba, "get_num_threads", lambda: threads)
    assert torch.equal(run(case), alone)
    assert torch.equal(run_at_once(case, weight, bias), at_once)


def test_rows_may_be_views_of_wider_ones() -> None:
    case = lora_case(MIXES["mixed"], width=24, offsets=(0, 10, 30), ranks=[[8, 8]] * 5)
    wide_x, wide_y = torch.full((13, 40), float("nan")), torch.full((13, 50), 7.0)
    wide_x[:, 3:27], wide_y[:, 11:41] = case.x, case.y
    assert case.rows is not None
    NUMBA.add_lora(wide_y[:, 11:41], wide_x[:, 3:27], case.a, by_rank(case.b), case.offsets, case.ranks, case.rows)
    assert torch.equal(wide_y[:, 11:41], run(case))
    assert (wide_y[:, :11] == 7.0).all()
    assert (wide_y[:, 41:] == 7.0).all()


def test_agrees_with_the_reference_at_the_demo_models_shapes() -> None:
    slots = [i % 8 for i in range(32)]
    for width, offsets in ((576, (0, 576, 768, 960)), (576, (0, 1536, 3072)), (1536, (0, 576))):
        case = lora_case(slots, width=width, offsets=offsets, ranks=[[16] * (len(offsets) - 1)] * 8)
        y = case.y.clone()
        assert case.rows is not None
        REFERENCE.add_lora(y, case.x, case.a, case.b, offsets, case.ranks, case.rows)
        torch.testing.assert_close(run(case), y, **EXACT)


@pytest.mark.parametrize("mix", WITH_ROWS.values(), ids=WITH_ROWS.keys())
@pytest.mark.parametrize("width", [1, 8, 65, 576, 2 * DEPTH + 21])
@pytest.mark.parametrize("offsets", [(0, 1, 8, 15), (0, 64, 64, 201), (0, 576, 768, 960)])
def test_at_once_is_one_after_the_other(mix: list[int], width: int, offsets: tuple[int, ...]) -> None:
    case = lora_case(mix, width=width, offsets=offsets, ranks=MIXED_RANKS)
    weight, bias = torch.randn(offsets[-1], width), torch.randn(offsets[-1])
    assert torch.equal(run_at_once(case, weight), one_after_the_other(case, weight))
    y = run_at_once(case, weight, bias)
    assert torch.equal(y, one_after_the_other(case, weight, bias))
    base = torch.tensor(mix) < 0
    assert torch.equal(y[base], linear(case.x, weight, bias)[base])


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 31, PANEL, PANEL + 1])
@pytest.mark.parametrize("num_slots", [1, 8, 64])
def test_at_once_for_any_number_of_rows(num_rows: int, num_slots: int) -> None:
    slots = [(5 * i) % num_slots for i in range(num_rows)]
    case = lora_case(slots, width=100, offsets=(0, 300, 700), ranks=[[s % 9, 16] for s in range(num_slots)])
    weight = torch.randn(700, 100)
    assert torch.equal(run_at_once(case, weight), one_after_the_other(case, weight))


def test_at_once_with_ranks_that_are_all_zero_is_the_base() -> None:
    case = lora_case([0, -1, 1], width=100, offsets=(0, 70, 133), ranks=[[0, 0], [0, 0], [4, 4]])
    weight = torch.randn(133, 100)
    assert torch.equal(run_at_once(case, weight), linear(case.x, weight, None))


@pytest.mark.skipif(not simd.HAS_HALF, reason="this processor does not widen float16 itself")
@pytest.mark.parametrize("mix", WITH_ROWS.values(), ids=WITH_ROWS.keys())
@pytest.mark.parametrize(("width", "offsets"), [(65, (0, 1, 8, 15)), (576, (0, 64, 64, 203)), (40, (0, 600, 601, 960))])
def test_weights_in_half_precision_give_the_numbers_they_stand_for(
    mix: list[int], width: int, offsets: tuple[int, ...]
) -> None:
    case = lora_case(mix, width=width, offsets=offsets, ranks=MIXED_RANKS)
    half = dataclasses.replace(case, a=case.a.half(), b=case.b.half())
    for slot, value in ((0, 2.0**-24), (1, 65504.0), (3, -0.0)):
        half.a[slot, 0, 0, :3] = value
        half.b[slot, 0, 0] = value
    wide = dataclasses.replace(half, a=half.a.float(), b=half.b.float())
    weight = torch.randn(offsets[-1], width)
    assert torch.equal(run(half), run(wide))
    assert torch.equal(run_at_once(half, weight), run_at_once(wide, weight))
    with pytest.raises(ValueError, match=r"b: torch.float32 .*needed is torch.float16"):
        run(dataclasses.replace(half, b=wide.b))


def test_warm_up_leaves_nothing_to_compile() -> None:
    warm_up()
    run(lora_case([0, 1, -1, 1], width=9, offsets=(0, 3, 6), ranks=[[2, 3], [4, 0]]))
    run_at_once(lora_case([0], width=8, offsets=(0, 5), ranks=[[4]]), torch.ones(5, 8), torch.ones(5))
    assert len(lora.add_lora_rows.signatures) == len(lora.linear_lora_rows.signatures) == 1


CASE = lora_case([0, 1, -1, 1], width=9, offsets=(0, 3, 6), ranks=[[2, 4], [4, 0]])
NAMES = ["y", "x", "a", "b", "offsets", "ranks", "rows"]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("y", CASE.y.double(), "y: torch.float64"),
        ("y", CASE.y[:3], "y: 3 rows for 4 of x"),
        ("x", CASE.x[:, :8], "a: width 9 for rows of x"),
        ("a", CASE.a[:, :1], "a: strides"),
        ("b", by_rank(CASE.b[:, :5]), "b: torch.float32 .2, 5, 4."),
        ("b", by_rank(CASE.b).double(), "b: torch.float64"),
        ("b", CASE.b, "b: strides .*must lie by ranks"),
        ("offsets", (0, 6), "offsets: .*do not cut 6 outputs into 2 parts"),
        ("offsets", (0, 7, 6), "offsets: "),
        ("offsets", (1, 3, 6), "offsets: "),
        ("ranks", CASE.ranks[:1], "ranks: shape"),
        ("ranks", CASE.ranks + 1, r"ranks: \[3, 5\] in slot 0, whose room is for 0 to 4"),
        ("ranks", CASE.ranks - 1, "ranks: .*in slot 1"),
        ("rows", AdapterRows.of([0, 1, 2]), "rows: slot 2 of a bank of 2"),
        ("rows", AdapterRows.of([0, 1, -1, 1, 1]), "rows: row 4 of a step of 4"),
        ("rows", AdapterRows.of([0, 1, -1, 1], "meta"), "rows: they lie on meta"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, value: object, says: str) -> None:
    args = [CASE.y.clone(), CASE.x, CASE.a, by_rank(CASE.b), CASE.offsets, CASE.ranks, CASE.rows]
    args[NAMES.index(name)] = value
    before = args[0].clone()
    with pytest.raises(ValueError, match=f"^({says})"):
        lora.add_lora(*args)
    assert torch.equal(args[0], before)
    if name != "y":
        weight = torch.ones(6, 8 if name == "x" else 9)
        with pytest.raises(ValueError, match=f"^({says})"):
            lora.LoraLinear(weight, None, *args[2:-1])(args[1], args[-1])


@pytest.mark.parametrize(
    ("weight", "bias", "says"),
    [
        (torch.ones(6, 8), None, "a: width 9 for rows of x of 8"),
        (torch.ones(5, 9), None, "b: .*needed is torch.float32 .2, 5, 4."),
        (torch.ones(9, 6).T, None, "weight: strides"),
        (torch.ones(6, 9), torch.ones(5), "bias: 5 entries"),
    ],
)
def test_a_base_that_does_not_fit_is_refused_by_name(weight: torch.Tensor, bias: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        run_at_once(CASE, weight, bias)


@pytest.mark.parametrize(
    ("x", "says"),
    [(CASE.x[:, :8], "weight: shape .6, 9. for rows of x .4, 8."), (CASE.x.half(), "x: torch.float16")],
)
def test_rows_that_a_layer_cannot_take_are_refused_by_name(x: torch.Tensor, says: str) -> None:
    layer = lora.LoraLinear(torch.ones(6, 9), None, CASE.a, by_rank(CASE.b), CASE.offsets, CASE.ranks)
    assert CASE.rows is not None
    with pytest.raises(ValueError, match=f"^{says}"):
        layer(x, CASE.rows)


def test_a_layer_computes_with_what_lies_in_the_bank_now() -> None:
    b, weight = by_rank(CASE.b), torch.ones(6, 9)
    layer = lora.LoraLinear(weight, None, CASE.a, b, CASE.offsets, CASE.ranks)
    b.zero_()
    assert CASE.rows is not None
    assert torch.equal(layer(CASE.x, CASE.rows), linear(CASE.x, weight, None))
