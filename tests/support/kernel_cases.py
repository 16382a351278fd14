"""Paged attention inputs whose pages are shuffled, and filled with NaN wherever no sequence has written."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PagedCase:
    """Inputs of `Ops.paged_attention`; sequence s has its last `rows[s]` of `lens[s]` positions in the step."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_table: Tensor
    scale: float

    def args(self, window: int | None) -> tuple:
        pages = (self.k_pages, self.v_pages)
        return self.q, *pages, self.query_starts, self.context_lens, self.block_table, self.scale, window

    def only(self, sequence: int, first: int = 0, count: int | None = None) -> "PagedCase":
        """One sequence alone, or `count` of its rows from `first`, as an earlier chunk would have had them."""
        start, stop = self.query_starts[sequence : sequence + 2].tolist()
        count = stop - start - first if count is None else count
        left_out = stop - start - first - count
        return PagedCase(
            q=self.q[start + first : start + first + count].clone(),
            k_pages=self.k_pages,
            v_pages=self.v_pages,
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            context_lens=self.context_lens[sequence : sequence + 1] - left_out,
            block_table=self.block_table[sequence : sequence + 1].clone(),
            scale=self.scale,
        )


def paged_case(
    lens: list[int], rows: list[int], *, heads: int, kv_heads: int, width: int, block: int = 16, seed: int = 0
) -> PagedCase:
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-n // block) for n in lens]
    order = torch.randperm(sum(blocks) + 2, generator=generator)
    table = torch.zeros(len(lens), max(blocks) + 1, dtype=torch.int32)
    k_pages = torch.full((len(order), kv_heads, block, width), float("nan"))
    v_pages = k_pages.clone()
    at = 0
    for s, (n, length) in enumerate(zip(blocks, lens, strict=True)):
        table[s, :n] = order[at : at + n]
        at += n
        for b, page in enumerate(table[s, :n].tolist()):
            used = min(block, length - b * block)
            k_pages[page, :, :used] = torch.randn(kv_heads, used, width, generator=generator)
            v_pages[page, :, :used] = torch.randn(kv_heads, used, width, generator=generator)
    return PagedCase(
        q=torch.randn(sum(rows), heads, width, generator=generator),
        k_pages=k_pages,
        v_pages=v_pages,
        query_starts=torch.tensor([0, *rows]).cumsum(0).to(torch.int32),
        context_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=table,
        scale=width**-0.5,
    )
