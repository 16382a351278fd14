import numba
import pytest
import torch
from kernel_cases import PagedCase, paged_case

from izh.kernels.cpu import attention
from izh.kernels.cpu.threads import choose_layer
from izh.kernels.reference import REFERENCE

choose_layer()

MIXED_LENS = [1, 33, 200, 1100, 64, 515, 17]
MIXED_ROWS = [1, 1, 90, 1, 64, 3, 5]


def run(case: PagedCase, window: int | None = None) -> torch.Tensor:
    return attention.paged_attention(*case.args(window))


@pytest.mark.parametrize("window", [None, 1, 50, 700])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "block"),
    [
        (3, 3, 16, 16),
        (9, 3, 64, 16),
        (8, 1, 80, 4),
        (8, 8, 32, 32),
        (6, 2, 96, 16),
        (8, 1, 128, 128),
        (2, 2, 256, 16),
        (5, 1, 20, 6),
        (3, 1, 7, 3),
        (128, 2, 8, 1),
    ],
)
def test_agrees_with_the_reference(heads: int, kv_heads: int, width: int, block: int, window: int | None) -> None:
    case = paged_case(MIXED_LENS, MIXED_ROWS, heads=heads, kv_heads=kv_heads, width=width, block=block)
    torch.testing.assert_close(run(case, window), REFERENCE.paged_attention(*case.args(window)), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1025, 8200])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_every_edge_of_a_block_step_and_span(length: int, rows: int) -> None:
    case = paged_case([length], [min(rows, length)], heads=6, kv_heads=2, width=16)
    for window in (None, 64, 513):
        expected = REFERENCE.paged_attention(*case.args(window))
        torch.testing.assert_close(run(case, window), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 20), (8, 1, 128)])
def test_a_row_is_the_same_whatever_else_is_in_the_step(shape: tuple[int, int, int], window: int | None) -> None:
    heads, kv_heads, width = shape
    case = paged_case(MIXED_LENS, MIXED_ROWS, heads=heads, kv_heads=kv_heads, width=width)
    together = run(case, window)
    for s, (start, stop) in enumerate(zip(case.query_starts[:-1], case.query_starts[1:], strict=True)):
        assert torch.equal(together[start:stop], run(case.only(s), window)), f"sequence {s}"


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("size", [1, 2, 7, 16, 100])
def test_a_row_is_the_same_in_a_chunk_of_any_size(size: int, window: int | None) -> None:
    case = paged_case([1300], [220], heads=9, kv_heads=3, width=64)
    chunks = [case.only(0, at, min(size, 220 - at)) for at in range(0, 220, size)]
    assert torch.equal(run(case, window), torch.cat([run(chunk, window) for chunk in chunks]))


def test_a_row_is_the_same_on_any_number_of_threads() -> None:
    case = paged_case([3000, 700, 600], [1, 2, 300], heads=9, kv_heads=3, width=64)
    before = numba.get_num_threads()
    try:
        results = []
        for threads in range(1, numba.config.NUMBA_NUM_THREADS + 1):
            numba.set_num_threads(threads)
            results.append(run(case))
    finally:
        numba.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_neighbours_whose_split_spans_adjoin_stay_apart() -> None:
    case = paged_case([1100, 2200], [1, 1], heads=2, kv_heads=1, width=16)  # windows: spans 0 to 2, then 3 and 4
    expected = REFERENCE.paged_attention(*case.args(600))
    torch.testing.assert_close(run(case, 600), expected, rtol=2e-5, atol=2e-5)


def test_queries_may_be_a_view_of_a_fused_projection() -> None:
    case = paged_case([40, 70], [1, 70], heads=6, kv_heads=2, width=16)
    fused = torch.randn(71, 10 * 16)
    view = fused[:, : 6 * 16].unflatten(-1, (6, 16))
    _, *rest = case.args(None)
    assert torch.equal(attention.paged_attention(view, *rest), attention.paged_attention(view.contiguous(), *rest))


def test_large_scores_neither_overflow_nor_vanish() -> None:
    case = paged_case([300, 80], [1, 80], heads=4, kv_heads=2, width=32)
    case.q.mul_(300.0)
    out = run(case)
    expected = REFERENCE.paged_attention(*case.args(None))
    assert torch.isfinite(out).all()
    torch.testing.assert_close(
        out, expected, rtol=1e-3, atol=1e-3
    )  # scores near 1000 carry an error of 1e-4 themselves


def test_blocks_before_the_window_are_not_read() -> None:
    case = paged_case([300], [2], heads=4, kv_heads=2, width=32)
    expected = run(case, 100)
    gone = case.block_table[0, : (300 - 2 + 1 - 100) // 16].long()
    case.k_pages[gone] = float("nan")
    case.v_pages[gone] = float("nan")
    case.block_table[0, : len(gone)] = -1
    assert torch.equal(run(case, 100), expected)


def test_a_step_without_rows_is_empty() -> None:
    case = paged_case([5], [1], heads=2, kv_heads=1, width=8)
    none = torch.zeros(0, dtype=torch.int32)
    out = attention.paged_attention(
        case.q[:0], case.k_pages, case.v_pages, torch.zeros(1, dtype=torch.int32), none, case.block_table[:0], 1.0, None
    )
    assert out.shape == (0, 2, 8)


GOOD = paged_case([40, 7], [3, 1], heads=4, kv_heads=2, width=8)
NAMES = ("q", "k_pages", "v_pages", "query_starts", "context_lens", "block_table", "scale", "window")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("q", GOOD.q.double(), "float64"),
        ("q", GOOD.q[0], "3 dimensions"),
        ("q", GOOD.q[:, :3], "3 heads"),
        ("q", GOOD.q[..., :4], "do not fit pages"),
        ("q", torch.randn(4, 8, 4).transpose(1, 2), "contiguous"),
        ("q", torch.empty(4, 4, 8, device="meta"), "meta"),
        ("k_pages", GOOD.k_pages[:, :, ::2], "contiguous"),
        ("v_pages", GOOD.v_pages[:2].clone(), "differs from k_pages"),
        ("query_starts", torch.tensor([0, 4], dtype=torch.int32), "need one more"),
        ("query_starts", torch.tensor([0, 3, 4]), "int64"),
        ("query_starts", torch.tensor([0, 3, 5], dtype=torch.int32), "must rise from 0"),
        ("query_starts", torch.tensor([0, 5, 4], dtype=torch.int32), "must rise from 0"),
        ("context_lens", torch.tensor([40], dtype=torch.int32), "1 entries for 2"),
        ("context_lens", torch.tensor([2, 7], dtype=torch.int32), "fewer than its rows"),
        ("block_table", torch.full((2, 4), 99, dtype=torch.int32), "sequence 0 names a block"),
        ("block_table", GOOD.block_table[:, :2].contiguous(), "2 blocks of 16 for sequence 0 of 40 keys"),
        ("window", 0, "the least is 1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, value: object, says: str) -> None:
    args = list(GOOD.args(None))
    args[NAMES.index(name)] = value
    with pytest.raises(ValueError, match=f"^{name}: .*{says}"):
        attention.paged_attention(*args)
