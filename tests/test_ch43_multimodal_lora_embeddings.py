"""The contracts of images, pooling, reranking and adapters by their public names, one sentence of each at a time.

What every part does in depth is tested beside it; here is what a user of the contracts may rely on.
"""

import asyncio
import base64
import io

import numpy as np
import pytest
import tiny_checkpoint
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from izh import LLM, SamplingParams
from izh.adapters import AdapterBank
from izh.errors import AdapterError, RequestError
from izh.kernels import bgmv, grouped_lora, sgmv
from izh.kernels.lora import AdapterRows
from izh.multimodal import (
    VisionConfig,
    VisionEncoder,
    VisionProcessor,
    expand_images,
    mrope_cos_sin,
    validate_features,
)
from izh.pooling import HFEncoder, PoolingService, pool_hidden

CONFIG = VisionConfig(image_size=16, patch_size=4, width=32, heads=2, layers=1, output_width=64)
SECTIONS = (2, 3, 3)


def uri(colour, size=(20, 10)):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


# -- 1. images become tokens ---


def test_sixteen_pixels_in_patches_of_four_are_sixteen_rows():
    processor, encoder = VisionProcessor(CONFIG), VisionEncoder(CONFIG)
    pixels = processor(uri("red")).pixels
    assert pixels.shape == (3, 16, 16)
    assert not pixels.requires_grad
    assert pixels[0].min() == 1.0
    assert pixels[1].max() == -1.0
    assert encoder(pixels[None]).shape == (1, 16, 64)
    with pytest.raises(ValueError, match="16"):
        encoder(torch.zeros(1, 3, 20, 20))


@pytest.mark.parametrize("wrong", [{"patch_size": 5}, {"heads": 3}])
def test_sizes_that_do_not_divide_are_refused(wrong):
    with pytest.raises(ValueError, match="divide"):
        VisionEncoder(VisionConfig(**(vars(CONFIG) | wrong)))


def test_remote_urls_are_never_fetched_and_pixels_are_bounded():
    with pytest.raises(RequestError):
        VisionProcessor(CONFIG)("https://example.com/a.png")
    with pytest.raises(RequestError, match="100"):
        VisionProcessor(CONFIG, max_image_pixels=100)(uri("red", (11, 10)))


def test_placeholders_expand_and_the_cursor_moves_by_the_largest_side():
    rows = torch.randn(6, 64)
    made = expand_images([5, 9, 6], 9, [rows], [(1, 2, 3)], SECTIONS)
    assert len(made.token_ids) == 2 + 6
    assert made.image_rows.keys() == set(range(1, 7))
    assert torch.equal(made.image_rows[3], rows[2])
    assert made.positions.dtype == torch.long
    assert made.positions.T.tolist() == [
        [0, 0, 0],
        *[[1, 1 + y, 1 + x] for y in range(2) for x in range(3)],
        [4, 4, 4],
    ]
    assert made.delta == 5 - 8
    for ids, grids, embeddings in (([5], [(1, 2, 3)], [rows]), ([9], [(1, 0, 3)], [rows]), ([9], [(1, 2, 2)], [rows])):
        with pytest.raises(ValueError, match=r"\d"):
            expand_images(ids, 9, embeddings, grids, SECTIONS)


def test_equal_coordinates_are_ordinary_rotary_positions():
    positions = torch.arange(7).expand(3, -1)
    cos, sin = mrope_cos_sin(positions, 16, 1e4, SECTIONS, torch.float32)
    angles = torch.arange(7)[:, None] * 1e4 ** (-torch.arange(0, 16, 2) / 16)
    assert torch.allclose(cos[:, :8], angles.cos(), atol=1e-6)
    assert torch.allclose(sin[:, :8], angles.sin(), atol=1e-6)
    with pytest.raises(ValueError, match="16"):
        mrope_cos_sin(positions, 16, 1e4, (2, 3, 4), torch.float32)


def test_features_are_copied_and_named_by_their_values():
    def features(rows):
        made = expand_images([5, 9, 6], 9, [rows], [(1, 2, 3)], SECTIONS)
        return validate_features(made.features(), num_tokens=8, hidden_size=64, rotary_dim=16)

    rows = torch.randn(6, 64)
    first, same, other = features(rows), features(rows.clone()), features(rows + 1e-3)
    assert first.spans[0].digest == same.spans[0].digest != other.spans[0].digest
    rows.zero_()
    assert np.array_equal(first.rows, same.rows)
    rows[0, 0] = torch.nan
    with pytest.raises(RequestError, match="finite"):
        features(rows)


def test_features_travel_with_a_request_and_change_its_answer(tmp_path):
    llm = LLM(str(tiny_checkpoint.save_llama(tmp_path / "tiny")), kv_cache_gb=0.02, num_threads=1, quiet=True)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    answers = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        made = expand_images([5, 9, 6], 9, [torch.randn(6, 64)], [(1, 2, 3)], SECTIONS)
        (answer,) = llm.generate([made.token_ids], params, features=[made.features()])
        answers.append(answer.outputs[0].token_ids)
    assert answers[0] == answers[2] != answers[1]


# -- 2. embeddings and 3. reranking ---


def test_pooling_sees_no_padding():
    hidden = torch.randn(2, 4, 8)
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])
    assert torch.allclose(pool_hidden(hidden, mask, "mean", False)[0], hidden[0, :3].mean(0))
    assert torch.equal(pool_hidden(hidden, mask, "last", False), torch.stack([hidden[0, 2], hidden[1, 3]]))
    assert torch.allclose(pool_hidden(hidden, mask, "mean").norm(dim=1), torch.ones(2))
    for wrong in ({"mode": "cls"}, {"mode": "best"}, {"mask": mask * 0}, {"mask": mask[:1]}):
        with pytest.raises(ValueError, match=r"."):
            pool_hidden(**({"hidden": hidden, "mask": mask} | wrong))


class Letters:
    """A tokenizer of the contract: a letter is a token."""

    def encode(self, text):
        return [3 + ord(letter) % 90 for letter in text]

    def encode_pair(self, query, document):
        return [1, *self.encode(query), 2, *self.encode(document), 2]


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    config = BertConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    return BertModel(config).eval()


def service(bert, **options):
    return PoolingService(HFEncoder(bert), Letters(), "letters", **options)


def test_a_service_embeds_in_order_and_in_both_formats(bert):
    made = service(bert)
    try:
        floats = asyncio.run(made.embed(["abc", "a", "abcdef"]))
        coded = asyncio.run(made.embed(["abc", "a", "abcdef"], encoding_format="base64"))
        for index, length in enumerate((3, 1, 6)):
            vector = floats["data"][index]["embedding"]
            assert np.frombuffer(base64.b64decode(coded["data"][index]["embedding"]), "<f4").tolist() == vector
            with torch.inference_mode():
                ids = torch.tensor([Letters().encode("abcdef"[:length])])
                wanted = F.normalize(bert(ids).last_hidden_state.mean(1), dim=1)[0]
            assert np.allclose(vector, wanted, atol=1e-5)
        assert floats["usage"]["prompt_tokens"] == 10
        for wrong in ([], "", "x" * 600, ["x"] * 33):
            with pytest.raises(RequestError):
                asyncio.run(made.embed(wrong))
        with pytest.raises(RequestError, match="dimensions"):
            asyncio.run(made.embed("abc", dimensions=8))
    finally:
        made.close()


def test_a_service_with_a_head_reranks_pairs(bert):
    head = nn.Linear(32, 1)
    made = service(bert, score_head=head, normalize=False)
    try:
        answer = asyncio.run(made.rerank("ab", ["cd", "ef", "cd"], top_n=2, raw_scores=True))
        with torch.inference_mode():
            ids = [Letters().encode_pair("ab", text) for text in ("cd", "ef", "cd")]
            wanted = head(bert(torch.tensor(ids)).last_hidden_state.mean(1))[:, 0]
        order = sorted(range(3), key=lambda i: (-round(wanted[i].item(), 5), i))[:2]
        assert [each["index"] for each in answer["results"]] == order
        for each in answer["results"]:
            assert each["relevance_score"] == pytest.approx(wanted[each["index"]].item(), abs=1e-5)
        for query, documents, top_n in (("", ["a"], 1), ("q", [], 1), ("q", ["a"], 0), (1, ["a"], 1)):
            with pytest.raises(RequestError):
                asyncio.run(made.rerank(query, documents, top_n))
    finally:
        made.close()
    headless = service(bert)
    with pytest.raises(RequestError, match=r"rerank|head"):
        asyncio.run(headless.rerank("q", ["a"]))
    headless.close()


# -- 4. many adapters, one batch ---


def test_the_kernels_are_the_definition():
    torch.manual_seed(0)
    x, a, b = torch.randn(5, 33), torch.randn(3, 4, 33), torch.randn(3, 17, 4)
    slots = torch.tensor([2, -1, 0, 2, -1])
    wanted = torch.stack([b[s] @ (a[s] @ row) if s >= 0 else torch.zeros(17) for s, row in zip(slots, x, strict=True)])
    assert torch.allclose(grouped_lora(x, a, b, slots), wanted, atol=1e-4)
    assert torch.equal(grouped_lora(x, a, b, slots)[1], torch.zeros(17))
    assert torch.allclose(bgmv(x, a, b, slots), wanted, atol=1e-4)
    assert torch.allclose(sgmv(x, a, b, AdapterRows.of(slots)), wanted, atol=1e-4)


def test_a_bank_gives_each_row_its_adapter_and_leases_are_counted():
    torch.manual_seed(0)
    model = nn.ModuleDict({"q_proj": nn.Linear(8, 6, bias=False), "v_proj": nn.Linear(8, 6, bias=False)})
    base = model["q_proj"].weight.detach().clone()
    bank = AdapterBank(model, capacity=2, max_rank=4)
    weights = {"q_proj": (torch.randn(2, 8), torch.randn(6, 2))}
    slot = bank.load("support", weights, alpha=4.0)
    x = torch.randn(3, 8)
    held, identity = bank.acquire("support")
    assert held == slot
    assert identity[0] == "lora"
    bank.activate([slot, -1, slot], decode=True)
    with torch.inference_mode():
        y = model["q_proj"](x)
    a, b = weights["q_proj"]
    assert torch.allclose(y, x @ base.T + torch.tensor([1.0, 0, 1])[:, None] * 2 * (x @ a.T @ b.T), atol=1e-5)
    assert torch.equal(y[1], F.linear(x, base)[1])
    with pytest.raises(AdapterError):
        bank.unload("support")
    bank.release(slot)
    with pytest.raises(Exception, match="release"):
        bank.release(slot)
    for wrong in ({"k_proj": weights["q_proj"]}, {"q_proj": (torch.randn(2, 7), b)}, {"q_proj": (a * torch.inf, b)}):
        with pytest.raises(AdapterError):
            bank.load("wrong", wrong, alpha=4.0)
    twin = bank.load("twin", weights, alpha=4.0)
    assert bank.acquire("twin") == (twin, identity)
