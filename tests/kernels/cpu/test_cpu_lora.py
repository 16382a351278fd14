import numba
import pytest
import torch
from lora_cases import MIXES, LoraCase, lora_case

from izh.kernels.cpu import lora
from izh.kernels.cpu.table import NUMBA, warm_up
from izh.kernels.cpu.threads import choose_layer
from izh.kernels.lora import AdapterRows
from izh.kernels.reference import REFERENCE

choose_layer()

EXACT = {"rtol": 2e-5, "atol": 2e-5}
WITH_ROWS = {name: mix for name, mix in MIXES.items() if max(mix) >= 0}
MIXED_RANKS = [[8, 16, 3], [1, 0, 64], [2, 5, 7], [12, 4, 33], [0, 0, 0]]


def run(case: LoraCase) -> torch.Tensor:
    assert case.rows is not None
    y = case.y.clone()
    NUMBA.add_lora(y, case.x, case.a, case.b, case.offsets, case.ranks, case.rows)
    return y


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
    """One adapter with adjoining rows for torch, one as long but scattered, one short, and the base, in one step."""
    n = lora.LONG
    slots = [3, -1, *[0] * n, 2, *[1, -1] * n, 2, 3]
    case = lora_case(slots, width=72, offsets=(0, 24, 40), ranks=[[16, 16], [8, 8], [16, 3], [1, 16]])
    y = run(case)
    torch.testing.assert_close(y, case.expected(), **EXACT)
    for ranks in ([16, 4], [0, 16], [0, 0]):  # parts of different rank cannot share one product
        other = lora_case(slots, width=72, offsets=(0, 24, 40), ranks=[ranks, *[[16, 16]] * 3])
        torch.testing.assert_close(run(other), other.expected(), **EXACT)


def test_a_row_is_the_same_whatever_else_is_in_the_step() -> None:
    slots = [1, -1, 0, *[2] * 90, 1, 1, 1, 3, 0, *[1, 3] * 40]
    case = lora_case(slots, width=100, offsets=(0, 70, 133), ranks=[[16, 16], [16, 7], [8, 16], [5, 0]])
    together = run(case)
    for row in range(0, len(slots), 3):
        if slots[row] >= 0:
            assert torch.equal(run(case.only([row]))[0], together[row]), f"row {row}"


def test_a_row_is_the_same_on_any_number_of_threads() -> None:
    case = lora_case([0] * 30 + [1] * 2, width=576, offsets=(0, 576, 1000), ranks=[[16, 13], [16, 16]])
    before = numba.get_num_threads()
    try:
        results = []
        for threads in range(1, numba.config.NUMBA_NUM_THREADS + 1):
            numba.set_num_threads(threads)
            results.append(run(case))
    finally:
        numba.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_rows_may_be_views_of_wider_ones() -> None:
    case = lora_case(MIXES["mixed"], width=24, offsets=(0, 10, 30), ranks=[[8, 8]] * 5)
    wide_x, wide_y = torch.full((13, 40), float("nan")), torch.full((13, 50), 7.0)
    wide_x[:, 3:27], wide_y[:, 11:41] = case.x, case.y
    assert case.rows is not None
    NUMBA.add_lora(wide_y[:, 11:41], wide_x[:, 3:27], case.a, case.b, case.offsets, case.ranks, case.rows)
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


def test_warm_up_leaves_nothing_to_compile() -> None:
    warm_up()
    run(lora_case([0, 1, -1, 1], width=9, offsets=(0, 3, 6), ranks=[[2, 3], [4, 0]]))
    assert len(lora.add_lora_rows.signatures) == 1


CASE = lora_case([0, 1, -1, 1], width=9, offsets=(0, 3, 6), ranks=[[2, 4], [4, 0]])
NAMES = ["y", "x", "a", "b", "offsets", "ranks", "rows"]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("y", CASE.y.double(), "y: torch.float64"),
        ("y", CASE.y[:3], "y: 3 rows for 4 of x"),
        ("x", CASE.x[:, :8], "a: width 9 for rows of x"),
        ("a", CASE.a[:, :1], "a: strides"),
        ("b", CASE.b[:, :5].contiguous(), "b: shape"),
        ("offsets", (0, 6), "offsets: .*do not cut 6 outputs into 2 parts"),
        ("offsets", (0, 7, 6), "offsets: "),
        ("offsets", (1, 3, 6), "offsets: "),
        ("ranks", CASE.ranks[:1], "ranks: shape"),
        ("ranks", CASE.ranks + 1, r"ranks: \[3, 5\] in slot 0, whose room is for 0 to 4"),
        ("ranks", CASE.ranks - 1, "ranks: .*in slot 1"),
        ("rows", AdapterRows.of([0, 1, 2]), "rows: slot 2 of a bank of 2"),
        ("rows", AdapterRows.of([0, 1, -1, 1, 1]), "rows: row 4 of a step of 4"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, value: object, says: str) -> None:
    args = [CASE.y.clone(), CASE.x, CASE.a, CASE.b, CASE.offsets, CASE.ranks, CASE.rows]
    args[NAMES.index(name)] = value
    before = args[0].clone()
    with pytest.raises(ValueError, match=f"^({says})"):
        lora.add_lora(*args)
    assert torch.equal(args[0], before)
