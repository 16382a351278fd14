"""What computes the hidden rows: one call for padded batches, and for those that can, one without padding.

Owns: PaddedEncoder, PackedEncoder, RemoteEncoder and RemotePooler (the forms that PoolingService takes),
NativeEncoder, HFEncoder, DecoderEncoder.
Must not know: tokenizers, pooling, requests.

B = batch, L = positions, T = rows of sequences laid end to end, D = hidden size.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from izh.batch import Batch
from izh.model.decoder import Decoder
from izh.model.encoders.encoder import Encoder
from izh.request import Entry

_BLOCK = 16


class PaddedEncoder(Protocol):
    """Anything that maps token ids [B, L] and a mask [B, L] (1 = visible) to hidden states [B, L, D]."""

    def __call__(self, token_ids: Tensor, mask: Tensor) -> Tensor: ...


@runtime_checkable
class PackedEncoder(Protocol):
    """An encoder that needs no padding."""

    def packed(self, token_ids: Tensor, starts: Tensor, type_ids: Tensor | None) -> Tensor:
        """token_ids [T] int64, starts [S+1] int32 -> hidden rows [T, D]."""
        ...


@runtime_checkable
class RemotePooler(Protocol):
    """An encoder that is elsewhere, and pools what it computes there."""

    def submit(
        self, entries: Sequence[Entry], finish: Callable[[Tensor, Sequence[Entry]], list[Tensor]]
    ) -> Future[list[Tensor]]:
        """What `finish` makes of the entries' pooled rows, [S, D] float32. Cancelling the future ends the work."""
        ...


@runtime_checkable
class RemoteEncoder(Protocol):
    """An encoder in another process, with all that its checkpoint does to the rows afterwards."""

    def compute(self, entries: Sequence[Entry]) -> list[Tensor]:
        """What `PoolingService.compute` gives there. Called in the service's thread, which waits for it."""
        ...


class NativeEncoder:
    """An encoder of `izh.model.encoders`."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.vocab_size: int = encoder.spec.vocab_size
        self.max_length: int = encoder.spec.max_length

    def packed(self, token_ids: Tensor, starts: Tensor, type_ids: Tensor | None) -> Tensor:
        return self.encoder.forward(token_ids, starts, type_ids)


class HFEncoder:
    """A bidirectional encoder of `transformers`: any model whose output has `last_hidden_state`."""

    takes_types = True

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.vocab_size: int | None = getattr(model.config, "vocab_size", None)
        self._has_types = getattr(model.config, "type_vocab_size", 0) > 1

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor, mask: Tensor, type_ids: Tensor | None = None) -> Tensor:
        """token_ids, mask [B, L] -> [B, L, D]. The mask is passed on, so padding is not attended to."""
        return self._output(token_ids, mask, type_ids).last_hidden_state

    def _output(self, token_ids: Tensor, mask: Tensor, type_ids: Tensor | None) -> Any:
        device = self.model.device
        given = {"input_ids": token_ids.to(device), "attention_mask": mask.to(device)}
        if type_ids is not None and self._has_types:
            given["token_type_ids"] = type_ids.to(device)
        return self.model(**given)


class HFClassifier(HFEncoder):
    """A sequence classifier of `transformers`, as an encoder whose every row is the sequence's logits."""

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor, mask: Tensor, type_ids: Tensor | None = None) -> Tensor:
        """token_ids, mask [B, L] -> [B, L, num_labels]."""
        return self._output(token_ids, mask, type_ids).logits[:, None].expand(-1, token_ids.shape[1], -1)


class DecoderEncoder:
    """A causal decoder as an encoder: every token sees those before it, padding stands on the right.

    `model` is a `Decoder` of izh, whose rows are computed without padding, or a causal model of `transformers`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        if isinstance(model, Decoder):
            self.vocab_size: int | None = model.spec.vocab_size
            self.max_length: int | None = model.spec.max_length
        else:
            self.model = getattr(model, "base_model", model).eval()  # without the head over the vocabulary
            self.vocab_size = getattr(model.config, "vocab_size", None)
            self.max_length = getattr(model.config, "max_position_embeddings", None)

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """token_ids, mask [B, L] -> [B, L, D]; rows of padding have no meaning.

        Raises: ValueError when a visible token follows a hidden one: a causal model's positions count from the left.
        """
        visible = mask != 0
        if (visible[:, 1:] & ~visible[:, :-1]).any():
            raise ValueError("mask: a decoder needs padding on the right, after every visible token")
        if not isinstance(self.model, Decoder):
            device = self.model.device
            output = self.model(input_ids=token_ids.to(device), attention_mask=mask.to(device), use_cache=False)
            return output.last_hidden_state
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), visible.sum(1).cumsum(0).cpu()))
        rows = self.packed(token_ids[visible], starts.to(torch.int32), None)
        hidden = rows.new_zeros((*token_ids.shape, rows.shape[-1]))
        hidden[visible] = rows
        return hidden

    def packed(self, token_ids: Tensor, starts: Tensor, type_ids: Tensor | None) -> Tensor:
        """See PackedEncoder. A model of `transformers` gets the sequences padded."""
        if not isinstance(self.model, Decoder):
            lens = starts.diff().tolist()
            ids = torch.nn.utils.rnn.pad_sequence(list(token_ids.split(lens)), batch_first=True)
            mask = torch.arange(ids.shape[1]) < torch.tensor(lens)[:, None]
            return self(ids, mask.long())[mask]
        batch, pages = _paged(self.model, token_ids, starts)
        with torch.inference_mode():
            return self.model(batch, pages)


def _paged(decoder: Decoder, token_ids: Tensor, starts: Tensor) -> tuple[Batch, list[tuple[Tensor, Tensor]]]:
    """Whole sequences as one step over pages of their own, which live as long as the step."""
    weight = decoder.norm.weight
    device, spec = weight.device, decoder.spec
    lens = starts.diff().tolist()
    positions = torch.cat([torch.arange(n) for n in lens])
    blocks = [-(-n // _BLOCK) for n in lens]
    first = [0, *torch.tensor(blocks).cumsum(0).tolist()]
    table = torch.zeros(len(lens), max(blocks), dtype=torch.int32)
    for s, (start, stop) in enumerate(pairwise(first)):
        table[s, : stop - start] = torch.arange(start, stop)
    slots = torch.cat([torch.arange(n) + at * _BLOCK for n, at in zip(lens, first, strict=False)])
    shape = (first[-1], spec.num_kv_heads, _BLOCK, spec.head_dim)
    pages = [(weight.new_empty(shape), weight.new_empty(shape)) for _ in range(spec.num_layers)]
    batch = Batch(
        token_ids=token_ids.to(device),
        positions=positions[None].to(device),
        rope_lens=torch.cat([torch.full((n,), n) for n in lens]).to(device),
        query_starts=starts.to(device),
        context_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        write_slots=slots.to(device),
    )
    return batch, pages
