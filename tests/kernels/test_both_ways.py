"""Attention of rows that see each other both ways, against the plain definition."""

import pytest
import torch

from izh.kernels.both_ways import attend_both_ways

GROUPS, WIDTH, BLOCK = 2, 8, 4


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 50])
@pytest.mark.parametrize(("num_rows", "stop"), [(1, 1), (5, 5), (5, 8), (3, 22), (7, 23)])
def test_it_is_the_softmax_over_what_each_row_sees(heads, window, num_rows, stop):
    generator = torch.Generator().manual_seed(stop)
    num_blocks = -(-stop // BLOCK)
    blocks = torch.randperm(9, generator=generator)[:num_blocks].int()
    pages = torch.full((2, 9, GROUPS, BLOCK, WIDTH), 1e4)  # what nobody wrote would show
    keys, values = torch.randn(2, GROUPS, stop, WIDTH, generator=generator)
    for position in range(stop):
        block, offset = blocks[position // BLOCK], position % BLOCK
        pages[0, block, :, offset], pages[1, block, :, offset] = keys[:, position], values[:, position]
    q = torch.randn(num_rows, heads, WIDTH, generator=generator)
    out = attend_both_ways(q, pages[0], pages[1], blocks, stop, 0.3, window)
    for row in range(num_rows):
        first = 0 if window is None else max(0, stop - num_rows + row - window + 1)
        for head in range(heads):
            group = head // (heads // GROUPS)
            weights = (0.3 * keys[group, first:] @ q[row, head]).softmax(0)
            assert torch.allclose(out[row, head], weights @ values[group, first:], atol=1e-5)
