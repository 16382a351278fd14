"""One step's tensors.

Owns: Batch, the closed set of inputs a decoder can consume, plus paging.
Must not know: sequences, requests, features. A Stage fills its own channel and nothing else.

T = tokens in the step, S = sequences (chunks), P = position axes (1, or 3 for M-RoPE).
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Overrides:
    """Embedding rows that replace the lookup: row `rows[i]` of the step gets `values[i]`, its first D numbers.

    A model with K deepstack layers (Qwen3-VL) takes K further rows of an image: the next D numbers are added to the
    hidden state after layer 0, the following D after layer 1, and so on. They lie in the same tensor because they are
    one thing: made by one run of the image encoder, needed by the same rows of the same step, part of the same
    identity. So nothing between the encoder and the decoder has to know that a row has parts.
    """

    rows: Tensor  # [R] int64, positions in the flat token axis
    values: Tensor  # [R, (1 + K) * D]


@dataclass(slots=True)
class BothWays:
    """Rows of one sequence that see each other, also those after their own: what a model like Gemma 3 does within an
    image. They are whole: a chunk never ends inside (see ImageGate). All other rows see what lies before them only.

    Attention computes all rows causally and then these again, so that the causal op needs no case for them. Host
    numbers: rows start .. stop - 1 of the step, of sequence `sequence`, whose keys below `context_len` they see.
    """

    start: int
    stop: int
    sequence: int
    context_len: int


@dataclass(slots=True)
class Batch:
    """Model inputs, then paging. All index tensors lie on the model's device."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [P, T] int64, rotary positions
    rope_lens: Tensor  # [T] int64: the length each row's rotary frequencies are meant for, max(prompt, position + 1);
    #                    read only by recipes whose frequencies depend on it (dynamic, longrope)
    query_starts: Tensor  # [S + 1] int32: rows of sequence s are query_starts[s] .. query_starts[s+1]
    context_lens: Tensor  # [S] int32: keys the last row of sequence s sees, itself included
    block_table: Tensor  # [S, max blocks] int32, padded with 0
    write_slots: Tensor  # [T] int64: block * block_size + offset; -1 = KV already there, do not write
    overrides: Overrides | None = None
    both_ways: tuple[BothWays, ...] = ()
