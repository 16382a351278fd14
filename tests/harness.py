"""A decoder over paged KV without an engine: builds Batches for chunks of one or several sequences.

Blocks are handed out in shuffled order and pages start out full of large numbers, so that a wrong block, slot or mask
shows.
"""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from izh.batch import Batch, Overrides
from izh.model.decoder import Decoder


@dataclass
class Row:
    """A sequence: its tokens, how many of them are prompt, and its blocks."""

    token_ids: list[int]
    num_prompt: int
    blocks: list[int] = field(default_factory=list)


class PagedDecoder:
    """Runs chunks of sequences through a decoder, keeping their KV in pages."""

    def __init__(self, decoder: Decoder, block_size: int = 4, num_blocks: int = 256, seed: int = 0) -> None:
        spec = decoder.spec
        weight = decoder.norm.weight
        shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        self.decoder = decoder
        self.block_size = block_size
        self.pages = [
            (torch.full(shape, 1e4, dtype=weight.dtype), torch.full(shape, 1e4, dtype=weight.dtype))
            for _ in range(spec.num_layers)
        ]
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    def add(self, token_ids: list[int], num_prompt: int | None = None) -> Row:
        return Row(list(token_ids), len(token_ids) if num_prompt is None else num_prompt)

    def batch(self, chunks: list[tuple[Row, int, int]]) -> Batch:
        """Chunks are (row, start, stop)."""
        token_ids: list[int] = []
        positions: list[int] = []
        rope_lens: list[int] = []
        slots: list[int] = []
        starts = [0]
        for row, start, stop in chunks:
            while len(row.blocks) * self.block_size < stop:
                row.blocks.append(self._free.pop())
            token_ids += row.token_ids[start:stop]
            positions += range(start, stop)
            rope_lens += [max(row.num_prompt, p + 1) for p in range(start, stop)]
            slots += [
                row.blocks[p // self.block_size] * self.block_size + p % self.block_size for p in range(start, stop)
            ]
            starts.append(starts[-1] + stop - start)
        width = max(len(row.blocks) for row, _, _ in chunks)
        return Batch(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor([positions]),
            rope_lens=torch.tensor(rope_lens),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([stop for _, _, stop in chunks], dtype=torch.int32),
            block_table=torch.tensor(
                [row.blocks + [0] * (width - len(row.blocks)) for row, _, _ in chunks], dtype=torch.int32
            ),
            write_slots=torch.tensor(slots),
        )

    @torch.inference_mode()
    def logits(self, chunks: list[tuple[Row, int, int]], overrides: Overrides | None = None) -> list[Tensor]:
        """Logits of every row of each chunk, [stop - start, vocab]."""
        batch = self.batch(chunks)
        batch.overrides = overrides
        logits = self.decoder.logits(self.decoder(batch, self.pages))
        return list(logits.split([stop - start for _, start, stop in chunks]))

    def prompt_logits(self, token_ids: list[int], chunk: int | None = None) -> Tensor:
        """Logits of a whole prompt, [len, vocab], computed `chunk` tokens at a time (None: at once)."""
        row, size = self.add(token_ids), chunk or len(token_ids)
        return torch.cat(
            [self.logits([(row, i, min(i + size, len(token_ids)))])[0] for i in range(0, len(token_ids), size)]
        )
