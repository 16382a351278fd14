"""Decoders and models of transformers as encoders."""

import encoders_made
import pytest
import tiny_checkpoint
import torch
from transformers import AutoModel, AutoModelForCausalLM

from izh.kernels.cpu.table import NUMBA
from izh.kernels.cpu.threads import choose_layer
from izh.kernels.reference import REFERENCE
from izh.model.load import load_decoder, load_spec
from izh.model.source import resolve
from izh.pooling import DecoderEncoder, HFEncoder, PoolingService
from izh.pooling.encoders import PackedEncoder

choose_layer()
IDS = torch.randint(3, 250, (4, 40), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(40) < torch.tensor([40, 1, 17, 33])[:, None]).long()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint.save_llama(tmp_path_factory.mktemp("llama"))


def decoder(folder, ops):
    source = resolve(str(folder))
    return load_decoder(source, load_spec(source), ops, "cpu", torch.float32, quiet=True)[0]


@pytest.mark.parametrize("ops", [REFERENCE, NUMBA])
@torch.inference_mode()
def test_a_decoders_rows_are_those_of_transformers(folder, ops) -> None:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    ours = DecoderEncoder(decoder(folder, ops))(IDS, MASK)
    theirs = model(input_ids=IDS, attention_mask=MASK).last_hidden_state
    torch.testing.assert_close(ours[MASK != 0], theirs[MASK != 0], rtol=1e-4, atol=1e-4)
    assert ours.shape == theirs.shape


@torch.inference_mode()
def test_a_causal_model_of_transformers_is_used_without_its_head(folder) -> None:
    encoder = DecoderEncoder(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(encoder(IDS, MASK), model(input_ids=IDS, attention_mask=MASK).last_hidden_state)
    rows = encoder.packed(IDS[MASK != 0], torch.tensor([0, 40, 41, 58, 91], dtype=torch.int32), None)
    torch.testing.assert_close(rows, encoder(IDS, MASK)[MASK != 0])


def test_padding_stands_on_the_right(folder) -> None:
    with pytest.raises(ValueError, match="padding on the right"):
        DecoderEncoder(decoder(folder, NUMBA))(IDS, MASK.flip(1))


@pytest.mark.parametrize("is_ours", [True, False])
async def test_last_token_embeddings_by_the_service(folder, is_ours) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    encoder = DecoderEncoder(decoder(folder, NUMBA) if is_ours else model)
    assert isinstance(encoder, PackedEncoder)
    assert encoder.vocab_size == model.config.vocab_size
    service = PoolingService(encoder, tiny_checkpoint.tokenizer(), "tiny", mode="last", normalize=False)
    texts = ["hello world", "a", "the quick brown fox"]
    ours, _ = await service.vectors(texts)
    for text, vector in zip(texts, ours, strict=True):
        ids = torch.tensor([tiny_checkpoint.tokenizer().encode(text)])
        with torch.inference_mode():
            expected = model.model(input_ids=ids).last_hidden_state[0, -1]
        torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-4)
    service.close()


@torch.inference_mode()
def test_an_encoder_of_transformers_gets_the_mask_and_the_types(tmp_path) -> None:
    model = encoders_made.save(tmp_path, "bert")
    encoder = HFEncoder(model)
    ids, types = IDS % 100 + 4, (torch.arange(40) > 5).long().expand(4, 40)
    ids = ids.clamp(max=encoder.vocab_size - 1)
    expected = model(input_ids=ids, attention_mask=MASK, token_type_ids=types).last_hidden_state
    assert torch.equal(encoder(ids, MASK, types), expected)
    alone = encoder(ids[2:3, :17], MASK[2:3, :17])
    torch.testing.assert_close(encoder(ids, MASK)[2:3, :17], alone, rtol=1e-5, atol=1e-5)
    roberta = HFEncoder(encoders_made.save(tmp_path / "roberta", "roberta"))
    assert torch.equal(roberta(ids, MASK, types), roberta(ids, MASK))
