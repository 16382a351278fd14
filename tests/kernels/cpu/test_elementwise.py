import pytest
import torch

from izh.kernels.cpu import elementwise, exp2
from izh.kernels.cpu.table import NUMBA
from izh.kernels.cpu.threads import choose_layer
from izh.kernels.reference import REFERENCE

choose_layer()

ROWS = [0, 1, 5, 300]  # the last is over the threshold of threads for all but the narrowest
EXACT = {"rtol": 2e-5, "atol": 2e-5}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 7, 64, 576, 1001])
def test_rms_norm(rows: int, width: int) -> None:
    x, weight = random(rows, width + 3)[:, :width], random(width)
    torch.testing.assert_close(NUMBA.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), **EXACT)


def test_rms_norm_of_heads_inside_a_fused_row() -> None:
    fused, weight = random(33, 10 * 16), random(16)
    x = fused[:, 32:128].unflatten(-1, (6, 16))
    torch.testing.assert_close(NUMBA.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6), **EXACT)
    torch.testing.assert_close(NUMBA.rms_norm(x[0, 0], weight, 0), REFERENCE.rms_norm(x[0, 0], weight, 0), **EXACT)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 7, 576])
def test_add_rms_norm(rows: int, width: int) -> None:
    x, residual, weight = random(rows, width + 5)[:, :width], random(rows, width), random(width)
    expected, total = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
    out, new_residual = NUMBA.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(out, expected, **EXACT)
    assert torch.equal(new_residual, total)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "half"), [(64, 32), (80, 40), (96, 16), (16, 1), (10, 3)])
def test_rope_on_views_of_a_fused_row(rows: int, width: int, half: int) -> None:
    fused, angle = random(rows, 8 * width), random(rows, half)
    before = fused.clone()
    q, k = fused[:, : 5 * width].unflatten(-1, (5, width)), fused[:, 5 * width : 7 * width].unflatten(-1, (2, width))
    expected = REFERENCE.rope(q, k, angle.cos(), angle.sin())
    torch.testing.assert_close(NUMBA.rope(q, k, angle.cos(), angle.sin()), expected, **EXACT)
    assert torch.equal(fused[:, 7 * width :], before[:, 7 * width :])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "width", "block"), [(3, 64, 16), (1, 7, 4), (8, 80, 32)])
def test_write_kv(rows: int, heads: int, width: int, block: int) -> None:
    fused = random(rows, 2 * heads * width)
    k, v = fused.unflatten(-1, (2, heads, width)).unbind(1)
    num_blocks = rows // block + 3
    slots = torch.randperm(num_blocks * block, generator=torch.Generator().manual_seed(0))[:rows]
    slots[::3] = -1
    pages = [torch.zeros(num_blocks, heads, block, width) for _ in range(4)]
    NUMBA.write_kv(k, v, pages[0], pages[1], slots)
    REFERENCE.write_kv(k, v, pages[2], pages[3], slots)
    assert torch.equal(pages[0], pages[2])
    assert torch.equal(pages[1], pages[3])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 7, 1536])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations(name: str, width: int, rows: int) -> None:
    x = random(rows, 2 * width + 3)[:, : 2 * width] * 3
    torch.testing.assert_close(getattr(NUMBA, name)(x), getattr(REFERENCE, name)(x), **EXACT)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations_far_from_zero(name: str) -> None:
    gate = torch.tensor([-1e4, -200.0, -88.0, -20.0, 0.0, 20.0, 88.0, 200.0, 1e4])
    x = torch.cat((gate, torch.ones(9)))[None]
    torch.testing.assert_close(getattr(NUMBA, name)(x), getattr(REFERENCE, name)(x), rtol=1e-5, atol=1e-12)


def test_a_row_is_the_same_among_any_number_of_rows() -> None:
    x, weight = random(300, 576), random(576)
    for op in (lambda rows: NUMBA.rms_norm(rows, weight, 1e-5), NUMBA.silu_mul, NUMBA.gelu_tanh_mul):
        whole = op(x)
        assert torch.equal(whole, torch.cat([op(row) for row in x.split(1)]))


def test_exp2_is_exact_where_it_must_be() -> None:
    assert [exp2.exp2(torch.tensor(x).numpy()[()]) for x in (0.0, -1.0, 5.0, -126.5, -1e30)] == [
        1.0,
        0.5,
        32.0,
        0.0,
        0.0,
    ]
    x = torch.linspace(-125, 120, 4001)
    got = torch.tensor([float(exp2.exp2(value)) for value in x.numpy()], dtype=torch.float64)
    assert ((got - x.double().exp2()).abs() / x.double().exp2()).max() < 3e-7


ROW, HEADS, PAGES = torch.zeros(2, 8), torch.zeros(2, 3, 8), torch.zeros(4, 3, 4, 8)
SLOTS = torch.arange(2)


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("rms_norm", (ROW.double(), ROW[0], 1e-5), "x: torch.float64"),
        ("rms_norm", (ROW, ROW[0, :7], 1e-5), "weight: 7 entries"),
        ("rms_norm", (torch.zeros(8, 2).T, ROW[0], 1e-5), "x: strides"),
        ("rms_norm", (torch.zeros(1, 1, 2, 8), ROW[0], 1e-5), "x: 4 dimensions"),
        ("add_rms_norm", (ROW, ROW[:1], ROW[0], 1e-5), "residual: shape"),
        ("add_rms_norm", (ROW, ROW, ROW[0, :3], 1e-5), "weight: 3 entries"),
        ("rope", (HEADS, HEADS[:1], ROW[:, :4], ROW[:, :4]), "k: shape"),
        ("rope", (HEADS, HEADS, ROW, ROW), "cos: shape"),
        ("rope", (HEADS, HEADS, ROW[:, :4], ROW[:, :4]), "cos: strides"),
        ("rope", (HEADS, HEADS, torch.zeros(2, 4), torch.zeros(2, 3)), "sin: shape"),
        ("write_kv", (HEADS, HEADS[:1], PAGES, PAGES, SLOTS), "v: shape"),
        ("write_kv", (HEADS, HEADS, PAGES, PAGES[:1], SLOTS), "v_pages: shape"),
        ("write_kv", (HEADS[:, :2], HEADS[:, :2], PAGES, PAGES, SLOTS), "k: shape"),
        ("write_kv", (HEADS, HEADS, PAGES, PAGES, SLOTS.int()), "slots: torch.int32"),
        ("write_kv", (HEADS, HEADS, PAGES, PAGES, SLOTS[:1]), "slots: 1 entries"),
        ("write_kv", (HEADS, HEADS, PAGES, PAGES, SLOTS + 15), "slots: row 1 has slot 16, but the pages hold 16"),
        ("silu_mul", (torch.zeros(2, 7),), "x: width 7 is odd"),
        ("gelu_tanh_mul", (HEADS,), "x: torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, args: tuple, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        getattr(elementwise, name)(*args)
