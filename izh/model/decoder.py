"""The decoder: one forward pass over a step's rows.

Owns: Decoder, which covers every family whose differences a ModelSpec can say.
Must not know: families, checkpoints, sequences, features, sampling.
Invariant: row t of the output depends on the rows and KV of its own sequence only.

Names of the projections, which features may replace in place: `layers.{i}.attention.qkv_proj`,
`layers.{i}.attention.o_proj`, `layers.{i}.mlp.gate_up_proj`, `layers.{i}.mlp.down_proj`, `embed_tokens`, `lm_head`.
"""

import sys
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from izh.batch import Batch
from izh.kernels.decoder import Corrections, DecoderLayers, DecoderSizes
from izh.kernels.ops import Ops
from izh.model.layers import CosSin, DecoderLayer, Linear, Pages, RMSNorm
from izh.model.module import Module
from izh.model.rope import Rotary
from izh.model.spec import ModelSpec


class Embedding(Module):
    """Token embedding; its weight starts out unset and may be shared with `lm_head`."""

    def __init__(self, num_tokens: int, size: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_tokens, size, device=device, dtype=dtype))

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


class Decoder(Module):
    """A decoder-only transformer. Parameters are unset until `weights.fill` has written them."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.spec = spec
        self.ops = ops
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, device, dtype)
        self.layers = nn.ModuleList(DecoderLayer(spec, layer, ops, device, dtype) for layer in spec.layers)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, ops, device, dtype)
        self.lm_head = Linear(
            spec.hidden_size,
            spec.vocab_size,
            False,
            ops,
            torch.device("meta") if spec.tie_word_embeddings else device,
            dtype,
        )
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = [Rotary(rope, device) for rope in spec.ropes]
        # The reference rounds the scale to the weights' dtype before multiplying (55.4256 is 55.5 in bfloat16).
        self.embed_scale = torch.tensor(spec.embed_scale, dtype=dtype).item()
        self._joined: DecoderLayers | None = None
        self._most_joined = 0
        self.corrections: Callable[[], Corrections | None] = lambda: None
        """What adapters add to the layers in the next step: a bank of them puts its own in place of this."""
        self.requires_grad_(False)

    def pack(self) -> None:
        """Keep the projections' weights a second time, as many rows are multiplied fastest. The head's, which few rows
        reach, stay as they are."""
        for module in self.layers.modules():
            if isinstance(module, Linear):
                module.pack()

    def join(self) -> None:
        """Compute steps in one call for all layers from now on, if the ops have that, with the weights that there are
        now, and what adapters add to them: steps of few rows, and where weights have few bits, any. A step that needs
        more goes through the modules."""
        if self.ops.join_layers is None or self.norm.weight.dtype is not torch.float32:
            return
        spec = self.spec
        sizes = DecoderSizes(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            intermediate_size=spec.intermediate_size,
            eps=spec.rms_norm_eps,
            scale=spec.attention_scale,
            activation=spec.activation,
        )
        layers = [cast(DecoderLayer, layer).given() for layer in self.layers]
        self._joined = self.ops.join_layers(layers, sizes)
        self._most_joined = self.ops.few_rows if isinstance(layers[0].qkv, tuple) else sys.maxsize

    def forward(self, batch: Batch, pages: list[Pages]) -> Tensor:
        """The step's rows after the final norm, [T, hidden_size].

        `pages[i]` are layer i's k_pages and v_pages. Modifies the pages at `batch.write_slots`.
        """
        residual = self.embed(batch)
        positions = batch.positions[0] if batch.positions.shape[0] == 1 else batch.positions
        cos_sin = [rotary.cos_sin(positions, batch.rope_lens) for rotary in self.rotary]
        deeper = self._deepstack(batch)
        corrections = self.corrections()
        needs_modules = deeper or batch.both_ways or (corrections is not None and corrections.projections is None)
        if self._joined is None or len(residual) > self._most_joined or needs_modules:
            x, residual = self._one_by_one(residual, batch, cos_sin, pages, deeper)
        else:
            paging = batch.query_starts, batch.context_lens, batch.block_table, batch.write_slots
            x, residual = self._joined(residual, cos_sin, pages, *paging, corrections)
        return self.norm.add(x, residual)[0]

    def _one_by_one(
        self, residual: Tensor, batch: Batch, rotary: list[CosSin], pages: list[Pages], deeper: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """(what is still to be added, residual) after the last layer."""
        x: Tensor | None = None
        for index, (layer, layer_pages) in enumerate(zip(self.layers, pages, strict=True)):
            x, residual = layer(x, residual, batch, rotary, layer_pages)
            if index < len(deeper):
                assert batch.overrides is not None
                residual = residual.index_add(0, batch.overrides.rows, deeper[index])
        assert x is not None
        return x, residual

    def embed(self, batch: Batch) -> Tensor:
        """Input rows [T, hidden_size]: scaled token embeddings, with the batch's overrides put in as they are."""
        rows = self.embed_tokens(batch.token_ids)
        if self.embed_scale != 1.0:
            rows = rows * self.embed_scale
        if batch.overrides is not None:
            values = batch.overrides.values[:, : self.spec.hidden_size]
            rows = rows.index_copy(0, batch.overrides.rows, values.to(rows.dtype))
        return rows

    def _deepstack(self, batch: Batch) -> tuple[Tensor, ...]:
        """What the first layers' outputs get added at the batch's overridden rows, [R, hidden_size] each."""
        if batch.overrides is None:
            return ()
        values = batch.overrides.values.to(self.norm.weight.dtype)
        return values.split(self.spec.hidden_size, dim=1)[1:]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden_size] -> [N, vocab_size] float32."""
        logits = self.lm_head(hidden).float()
        if self.spec.logits_softcap is not None:
            logits = torch.tanh(logits / self.spec.logits_softcap) * self.spec.logits_softcap
        return logits
