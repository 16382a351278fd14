"""One step on the device: a Plan becomes a Batch, a forward pass, and Results.

Owns: how a plan is laid out in tensors. Holds the model, its KV pages, and the features' stages and heads.
Must not know: which features exist, what a request is for, scheduling.
Invariant: `run` changes nothing but KV pages of the plan's own blocks and the state that heads keep for its sequences.
"""

import math
import mmap
from collections.abc import Sequence as Many

import numpy as np
import torch

from izh.batch import Batch
from izh.model.decoder import Decoder
from izh.seams import Head, HiddenRows, Result, Stage
from izh.sequence import Chunk, Plan

Pages = list[tuple[torch.Tensor, torch.Tensor]]


def allocate_pages(model: Decoder, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Pages:
    """Zeroed key and value pages of every layer, each [num_blocks, kv heads, block_size, head_dim]. On a CPU memory is
    only touched when first written."""
    shape = (num_blocks, model.spec.num_kv_heads, block_size, model.spec.head_dim)
    return [(_zeros(shape, dtype, device), _zeros(shape, dtype, device)) for _ in range(model.spec.num_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch would write the zeros, for a second per GiB; the system gives them with each page when it is first used.
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Runner:
    """Runs plans. `stages` fill the batch, `heads` read the hidden rows, both in the given order."""

    def __init__(
        self,
        model: Decoder,
        pages: Pages,
        block_size: int,
        device: torch.device,
        stages: Many[Stage],
        heads: Many[Head],
    ) -> None:
        self._model = model
        self._pages = pages
        self._block_size = block_size
        self._device = device
        self._stages = stages
        self._heads = heads

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Result]:
        """Compute the plan's chunks. Whatever this raises, the plan's sequences are lost but the runner is not."""
        for stage in self._stages:
            stage.sync(plan)
        batch = assemble(plan.chunks, self._block_size, self._device)
        for stage in self._stages:
            stage.fill(plan, batch)
        hidden = self._model(batch, self._pages)
        results: list[Result] = []
        for head in self._heads:
            rows = head.rows(plan)
            if rows:
                all_rows = rows == list(range(len(hidden)))
                named = hidden if all_rows else hidden[torch.tensor(rows, device=self._device)]
                results += head.finish(plan, HiddenRows(named, rows, self._stages))
        return results


def assemble(chunks: list[Chunk], block_size: int, device: torch.device) -> Batch:
    """Lay the chunks end to end."""
    counts = [chunk.count for chunk in chunks]
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    token_ids: list[int] = []
    facts: list[tuple[int, int, int]] = []
    block_table = np.zeros((len(chunks), max(len(chunk.sequence.blocks) for chunk in chunks)), np.int32)
    for chunk, blocks in zip(chunks, block_table, strict=True):
        sequence = chunk.sequence
        blocks[: len(sequence.blocks)] = sequence.blocks
        facts.append((chunk.start - len(token_ids), sequence.num_prompt, sequence.num_cached))
        token_ids += sequence.token_ids[chunk.start : chunk.stop]
    chunk_of_row = np.repeat(np.arange(len(chunks)), counts)
    shift, num_prompt, num_cached = np.array(facts, np.int64)[chunk_of_row].T
    positions = np.arange(len(token_ids)) + shift
    slots = block_table[chunk_of_row, positions // block_size].astype(np.int64) * block_size + positions % block_size
    slots[positions < num_cached] = -1

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Batch(
        token_ids=on_device(np.array(token_ids, np.int64)),
        positions=on_device(positions[None]),
        rope_lens=on_device(np.maximum(num_prompt, positions + 1)),
        query_starts=on_device(starts),
        context_lens=on_device(np.array([chunk.stop for chunk in chunks], np.int32)),
        block_table=on_device(block_table),
        write_slots=on_device(slots),
    )
