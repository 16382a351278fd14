import subprocess
import sys

import pytest
import torch
from lora_cases import MIXES, LoraCase, lora_case

from izh.kernels.lora import AdapterRows, grouped_lora
from izh.kernels.triton.lora import bgmv, sgmv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = {"rtol": 2e-5, "atol": 2e-5}
RANKS = [[1], [64], [7], [16], [33]]


def both(case: LoraCase, ranks: torch.Tensor | None) -> dict[str, torch.Tensor]:
    x, a, b = case.x.to(DEVICE), case.a[:, 0].to(DEVICE), case.b.to(DEVICE)
    slots = torch.tensor(case.slots, device=DEVICE)
    ranks = None if ranks is None else ranks.to(DEVICE)
    return {
        "bgmv": bgmv(x, a, b, slots, ranks).cpu(),
        "sgmv": sgmv(x, a, b, AdapterRows.of(case.slots, DEVICE), ranks).cpu(),
    }


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize(("width", "outputs"), [(1, 1), (7, 33), (65, 130), (129, 17), (200, 64)])
def test_real_ranks_from_1_to_64_over_odd_widths(mix: list[int], width: int, outputs: int) -> None:
    """What lies beyond a slot's real rank is NaN here, so that touching it would show."""
    case = lora_case(mix, width=width, offsets=(0, outputs), ranks=RANKS)
    expected = case.expected() - case.y
    for name, y in both(case, case.ranks[:, 0].contiguous()).items():
        torch.testing.assert_close(y, expected, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
        assert not y[torch.tensor(mix) < 0].any(), name


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("rank", [1, 5, 16, 70])
def test_without_ranks_every_slot_has_the_highest(mix: list[int], rank: int) -> None:
    case = lora_case(mix, width=50, offsets=(0, 40), ranks=[[rank]] * 5)
    expected = grouped_lora(case.x, case.a[:, 0], case.b, torch.tensor(mix))
    for name, y in both(case, None).items():
        torch.testing.assert_close(y, expected, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def test_a_slot_of_rank_0_corrects_nothing() -> None:
    case = lora_case([0, 1, -1, 0, 1], width=20, offsets=(0, 12), ranks=[[0], [4]])
    for y in both(case, case.ranks[:, 0].contiguous()).values():
        assert not y[[0, 2, 3]].any()
        torch.testing.assert_close(y, case.expected() - case.y, **EXACT)


def test_long_segments_are_cut_into_tiles() -> None:
    slots = [1] * 70 + [0] + [2] * 33 + [-1] * 5 + [1] * 20
    case = lora_case(slots, width=40, offsets=(0, 24), ranks=[[16], [3], [8]])
    y = both(case, case.ranks[:, 0].contiguous())["sgmv"]
    torch.testing.assert_close(y, case.expected() - case.y, **EXACT)


def test_parts_of_a_fused_projection_and_of_wider_rows_need_no_copy() -> None:
    case = lora_case(MIXES["mixed"], width=18, offsets=(0, 9, 21), ranks=[[4, 2]] * 5)
    wide = torch.full((len(case.slots), 30), float("nan"), device=DEVICE)
    wide[:, 5:23] = case.x.to(DEVICE)
    a, b = case.a[:, 1].to(DEVICE), case.b.to(DEVICE)[:, 9:]
    ranks = case.ranks[:, 1].contiguous().to(DEVICE)
    expected = (case.expected() - case.y)[:, 9:]
    slots = torch.tensor(case.slots, device=DEVICE)
    torch.testing.assert_close(bgmv(wide[:, 5:23], a, b, slots, ranks).cpu(), expected, **EXACT)
    torch.testing.assert_close(sgmv(wide[:, 5:23], a, b, AdapterRows.of(slots, DEVICE), ranks).cpu(), expected, **EXACT)


def test_half_precision_is_summed_in_float32() -> None:
    mix = MIXES["skewed"]
    case = lora_case(mix, width=100, offsets=(0, 40), ranks=[[16]] * 5)
    x, a, b = (tensor.half().to(DEVICE) for tensor in (case.x, case.a[:, 0], case.b))
    slots = torch.tensor(mix, device=DEVICE)
    expected = grouped_lora(x, a, b, slots)
    for y in (bgmv(x, a, b, slots), sgmv(x, a, b, AdapterRows.of(mix, DEVICE))):
        assert y.dtype == torch.float16
        torch.testing.assert_close(y, expected, rtol=2e-3, atol=2e-3)


def test_no_rows_give_no_rows() -> None:
    x, a, b = torch.ones(0, 4, device=DEVICE), torch.ones(1, 2, 4, device=DEVICE), torch.ones(1, 3, 2, device=DEVICE)
    assert bgmv(x, a, b, torch.zeros(0, dtype=torch.int64, device=DEVICE)).shape == (0, 3)
    assert sgmv(x, a, b, None).shape == (0, 3)


X, A, B = torch.ones(2, 4), torch.ones(3, 2, 4), torch.ones(3, 5, 2)
SLOTS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((X[:, :3], A, B, SLOTS), "a: width 4"),
        ((X, A, B[:2], SLOTS), "b: shape"),
        ((X, A, torch.ones(3, 2, 5).mT, SLOTS), "b: strides"),
        ((X, A, B, SLOTS[:1]), "slots: shape"),
        ((X, A, B, SLOTS, torch.ones(3)), "ranks: torch.float32"),
        ((X, A, B, SLOTS, torch.ones(2, dtype=torch.int32)), "ranks: torch.int32"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(args: tuple, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        bgmv(*args)


def test_without_triton_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\nfrom izh.kernels import grouped_lora\nfrom izh.kernels import bgmv"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ImportError: bgmv and sgmv need Triton" in done.stderr
    assert "pip install 'izh[gpu]'" in done.stderr
