"""A decoder whose projections are packed computes what it computed before, and a row the same in any company."""

import harness
import tiny_checkpoint
import torch

from izh.kernels.cpu.row_limits import RowLimits
from izh.kernels.cpu.table import with_rows
from izh.model.load import load_decoder, load_spec
from izh.model.source import resolve

FEW = 32  # rows


@torch.inference_mode()
def test_packed_equals_plain_and_rows_do_not_depend_on_their_number(tmp_path):
    source = resolve(str(tiny_checkpoint.save_llama(tmp_path / "tiny", initializer_range=0.2)))
    spec, ops = load_spec(source), with_rows(RowLimits(plain=64, packed=FEW))
    decoder, _ = load_decoder(source, spec, ops, "cpu", torch.float32, quiet=True)
    prompt = [(7 * i) % 300 + 5 for i in range(150)]
    plain = harness.PagedDecoder(decoder).prompt_logits(prompt)
    decoder.pack()
    packed = harness.PagedDecoder(decoder).prompt_logits(prompt)
    assert (packed - plain).abs().max() < 1e-4
    linear = decoder.layers[0].attention.qkv_proj
    calls = []
    many = linear._packed
    linear._packed = lambda x: calls.append(len(x)) or many(x)
    x = torch.randn(4 * FEW, spec.hidden_size)
    assert torch.equal(linear(x)[: FEW + 1], linear(x[: FEW + 1]))
    assert calls == [4 * FEW, FEW + 1]
    assert torch.equal(linear(x[:FEW]), ops.linear(x[:FEW], linear.weight, None))
    assert len(calls) == 2, "few rows take the weight as it lies"
