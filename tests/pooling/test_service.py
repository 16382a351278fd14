"""The contract of PoolingService, with an encoder whose vectors can be told from the ids."""

import asyncio
import base64
import struct
import threading

import pytest
import torch

from izh.errors import ContextLengthError, OverloadedError, RequestError
from izh.pooling import PoolingService
from izh.pooling.recipe import Recipe
from izh.text.encoding import Tokens


class Words:
    """A word is the id of its length; texts begin with 1."""

    def encode(self, text: str) -> list[int]:
        return [1, *(len(word) for word in text.split())]


class Pairs(Words):
    def encode_pair(self, query: str, document: str) -> list[int]:
        return [*self.encode(query), 9, *self.encode(document)[1:]]


class Padded:
    """Row t of a sequence is (id, id squared, 1); remembers what it was given."""

    vocab_size = 50

    def __init__(self) -> None:
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, token_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.given.append((token_ids, mask))
        ids = token_ids.float()
        hidden = torch.stack((ids, ids**2, torch.ones_like(ids)), -1)
        return hidden.masked_fill(mask[..., None] == 0, float("nan"))


def vector(ids: list[int]) -> torch.Tensor:
    """What mean pooling makes of these ids."""
    x = torch.tensor(ids).float()
    return torch.stack((x, x**2, torch.ones_like(x)), -1).mean(0)


@pytest.fixture
def make():
    made = []

    def service(encoder=None, tokenizer=None, **options) -> PoolingService:
        options = {"normalize": False, "max_model_len": 8, "max_batch": 4, "pad_id": 7} | options
        made.append(PoolingService(encoder or Padded(), tokenizer or Pairs(), "tiny", **options))
        return made[-1]

    yield service
    for each in made:
        each.close()


def values(answer: dict) -> torch.Tensor:
    return torch.tensor([entry["embedding"] for entry in answer["data"]])


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("aa b", [[1, 2, 1]]),
        (["aa b", "", "cccc"], [[1, 2, 1], [1], [1, 4]]),
        ([3, 4, 5], [[3, 4, 5]]),
        ([[3], [4, 5, 6, 7], [3, 9]], [[3], [4, 5, 6, 7], [3, 9]]),
    ],
)
async def test_texts_and_ids_one_or_many_in_order(make, given, ids) -> None:
    answer = await make().embed(given)
    torch.testing.assert_close(values(answer), torch.stack([vector(each) for each in ids]))
    assert [entry["index"] for entry in answer["data"]] == list(range(len(ids)))
    assert {entry["object"] for entry in answer["data"]} == {"embedding"}
    num_tokens = sum(map(len, ids))
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def test_padding_is_pad_id_masked_and_uncounted(make) -> None:
    encoder = Padded()
    answer = await make(encoder).embed([[3], [4, 5, 6]])
    ((token_ids, mask),) = encoder.given
    assert token_ids.tolist() == [[3, 7, 7], [4, 5, 6]]
    assert mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert answer["usage"]["total_tokens"] == 4


async def test_vectors_are_normalized_by_default(make) -> None:
    out = values(await make(normalize=True).embed(["a", "bb cc"]))
    torch.testing.assert_close(out.norm(dim=1), torch.ones(2))


async def test_base64_is_little_endian_float32(make) -> None:
    service = make()
    plain, packed = await service.embed(["a", "bbb"]), await service.embed(["a", "bbb"], encoding_format="base64")
    for one, other in zip(plain["data"], packed["data"], strict=True):
        assert list(struct.unpack("<3f", base64.b64decode(other["embedding"]))) == one["embedding"]


@pytest.mark.parametrize(
    ("given", "options", "says", "param"),
    [
        ([], {}, "input is an empty list", "input"),
        (3, {}, "input must be a text", "input"),
        (None, {}, "input must be a text", "input"),
        ([1, "a"], {}, "input must be a text", "input"),
        (["a", 1.5], {}, "input must be a text", "input"),
        ([True, False], {}, "input must be a text", "input"),
        ([-1], {}, "input must be a text", "input"),
        ([[1], []], {}, r"input\[1\] is an empty list", "input"),
        ([[1], ["a"]], {}, r"input\[1\] must hold token ids", "input"),
        (["a"] * 5, {}, "input has 5 entries; .* at most 4", "input"),
        ([[3], [3, 50]], {}, r"input\[1\] has token id 50; .* 0 to 49", "input"),
        (
            "a",
            {"encoding_format": "int8"},
            "encoding_format must be one of float, base64, got 'int8'",
            "encoding_format",
        ),
        ("a", {"dimensions": 2}, "not trained to be cut", "dimensions"),
        ("a", {"dimensions": 0}, "at least 1, got 0", "dimensions"),
        ("a", {"dimensions": True}, "at least 1, got True", "dimensions"),
        ("a", {"prompt_name": "query"}, "'query' is not known; this model has no prompts", "prompt_name"),
        ("a", {"truncate_prompt_tokens": -1}, "cannot cut a text", "truncate_prompt_tokens"),
    ],
)
async def test_what_cannot_be_embedded_is_refused_with_the_numbers(make, given, options, says, param) -> None:
    encoder = Padded()
    with pytest.raises(RequestError, match=says) as raised:
        await make(encoder).embed(given, **options)
    assert raised.value.param == param
    assert encoder.given == []


async def test_too_long_names_the_entry_and_both_lengths(make) -> None:
    service = make()
    with pytest.raises(ContextLengthError, match=r"input\[1\] has 9 tokens; this model takes at most 8"):
        await service.embed(["a", "a b c d e f g h"])
    assert (await service.embed("a b c d e f g"))["usage"]["total_tokens"] == 8
    assert (await service.embed(list(range(3, 20)), truncate_prompt_tokens=-1))["usage"]["total_tokens"] == 8


async def test_dimensions_cut_and_renormalize_where_the_checkpoint_was_trained_for_it(make) -> None:
    service = make(recipe=Recipe(dimensions=(2, 3)))
    whole, cut = values(await service.embed("aa b")), values(await service.embed("aa b", dimensions=2))
    torch.testing.assert_close(cut, torch.nn.functional.normalize(whole[:, :2], dim=1))
    assert torch.equal(values(await service.embed("aa b", dimensions=3)), whole)
    with pytest.raises(RequestError, match="one of 2, 3, got 1"):
        await service.embed("a", dimensions=1)
    anything = make(recipe=Recipe(dimensions=()))
    assert values(await anything.embed("a", dimensions=1)).shape == (1, 1)
    with pytest.raises(RequestError, match="4, but vectors have 3 numbers"):
        await anything.embed("a", dimensions=4)


async def test_unknown_modes_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="mode 'sum' is not known"):
        PoolingService(Padded(), Pairs(), "tiny", mode="sum")


@pytest.mark.parametrize(("mode", "expected"), [("last", 4.0), ("cls", 1.0)])
async def test_modes_reach_the_pooling(make, mode, expected) -> None:
    assert values(await make(mode=mode).embed("a bbbb"))[0, 0] == expected


async def test_prompts_go_before_texts_and_may_be_left_out_of_pooling(make) -> None:
    class Marked(Words):
        special_ids = frozenset({1})

    recipe = Recipe(normalize=False, prompts={"query": "qqq ", "plain": ""}, default_prompt_name="query")
    out = values(await make(recipe=recipe).embed(["a", "bb"]))
    torch.testing.assert_close(out[0], vector([1, 3, 1]))
    service = make(tokenizer=Marked(), recipe=Recipe(normalize=False, prompts=recipe.prompts, includes_prompt=False))
    torch.testing.assert_close(values(await service.embed("bb"))[0], vector([1, 2]))
    torch.testing.assert_close(values(await service.embed("bb", prompt_name="query"))[0], vector([2]))
    torch.testing.assert_close(values(await service.embed("bb", prompt_name="plain"))[0], vector([1, 2]))
    with pytest.raises(RequestError, match="'other' is not known; this model has query, plain"):
        await service.embed("a", prompt_name="other")
    torch.testing.assert_close(values(await service.embed([5]))[0], vector([5]))  # ids are taken as they are


class Packed:
    """As Padded, without padding; remembers the types."""

    def __init__(self) -> None:
        self.types: list = []

    def packed(self, token_ids, starts, type_ids):
        self.types.append(type_ids)
        return Padded()(token_ids[None], torch.ones(1, len(token_ids)))[0]


async def test_packed_encoders_get_no_padding_and_the_same_answers(make) -> None:
    given = ["aa b", "", "cccc dd e"]
    answer = await make(Packed()).embed(given)
    torch.testing.assert_close(values(answer), values(await make().embed(given)))


async def test_rerank_sorts_by_score_then_index_and_keeps_indices_and_texts(make) -> None:
    service = make(score_head=lambda pooled: pooled[:, :1], max_batch=5)
    documents = ["a", "cccc", "bb", "dddd", "a"]
    answer = await service.rerank("q", documents)
    assert [result["index"] for result in answer["results"]] == [1, 3, 2, 0, 4]
    assert [result["document"]["text"] for result in answer["results"]] == ["cccc", "dddd", "bb", "a", "a"]
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == pytest.approx((1 + 1 + 9 + 4) / 4)
    assert answer["usage"] == {"prompt_tokens": 20, "total_tokens": 20}
    assert answer["model"] == "tiny"
    best = await service.rerank("q", documents, 2, return_documents=False)
    assert [result["index"] for result in best["results"]] == [1, 3]
    assert all("document" not in result for result in best["results"])
    assert len((await service.rerank("q", documents, 50))["results"]) == 5


async def test_scores_pass_the_activation_unless_raw_ones_are_asked_for(make) -> None:
    service = make(score_head=lambda pooled: pooled[:, 0], score_activation=torch.sigmoid)
    raw = (await service.rerank("q", ["a"], raw_scores=True))["results"][0]["relevance_score"]
    score = (await service.rerank("q", ["a"]))["results"][0]["relevance_score"]
    assert score == pytest.approx(torch.sigmoid(torch.tensor(raw)).item())


async def test_types_of_pairs_reach_the_encoder(make) -> None:
    class Typed(Words):
        def encode_pair(self, query: str, document: str) -> Tokens:
            return Tokens([1, 2, 3], [0, 0, 1])

    encoder = Packed()
    await make(encoder, Typed(), score_head=lambda pooled: pooled[:, 0]).rerank("q", ["a", "b"])
    assert encoder.types[0].tolist() == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("args", "says", "param"),
    [
        ((3, ["a"], None), "query must be a text", "query"),
        (("", ["a"], None), "query must be a text that is not empty", "query"),
        (("q", [], None), "documents must be a list of at least 1", "documents"),
        (("q", "a", None), "documents must be a list", "documents"),
        (("q", ["a", 3], None), r"documents\[1\] must be a text, not int", "documents"),
        (("q", ["a"], 0), "top_n must be an integer of at least 1, got 0", "top_n"),
        (("q", ["a"], -1), "got -1", "top_n"),
        (("q", ["a"], True), "got True", "top_n"),
        (("q", ["a"], "2"), "got '2'", "top_n"),
        (("q", ["a"] * 5, None), "documents has 5 entries; .* at most 4", "documents"),
        (("q", ["a", "a b c d e f"], None), r"documents\[1\] has 9 tokens; .* at most 8", "documents"),
    ],
)
async def test_what_cannot_be_reranked_is_refused(make, args, says, param) -> None:
    with pytest.raises(RequestError, match=says) as raised:
        await make(score_head=lambda pooled: pooled[:, 0]).rerank(*args)
    assert raised.value.param == param


async def test_reranking_needs_a_head_of_one_number_and_a_pair_convention(make) -> None:
    with pytest.raises(RequestError, match="no trained score head"):
        await make().rerank("q", ["a"])
    with pytest.raises(RequestError, match="no encode_pair"):
        await make(tokenizer=Words(), score_head=lambda pooled: pooled[:, 0]).rerank("q", ["a"])
    with pytest.raises(RequestError, match=r"gives \(2, 3\) for 2 pairs; .* one number for each"):
        await make(score_head=lambda pooled: pooled).rerank("q", ["a", "b"])


class Gated(Padded):
    """Waits in the forward until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.go = threading.Event(), threading.Event()

    def __call__(self, token_ids, mask):
        self.started.set()
        assert self.go.wait(20)
        return super().__call__(token_ids, mask)


async def test_the_event_loop_runs_while_the_forward_does(make) -> None:
    encoder = Gated()
    first = asyncio.create_task(make(encoder).embed("a"))
    await asyncio.to_thread(encoder.started.wait, 20)
    await asyncio.sleep(0)  # this coroutine runs although the forward has not ended
    assert not first.done()
    encoder.go.set()
    assert (await first)["usage"]["total_tokens"] == 2


async def test_concurrent_calls_share_a_step_and_a_cancelled_one_is_never_computed(make) -> None:
    encoder = Gated()
    service = make(encoder)
    first = asyncio.create_task(service.embed([3]))
    await asyncio.to_thread(encoder.started.wait, 20)
    gone = asyncio.create_task(service.embed([4]))
    others = [asyncio.create_task(service.embed([[n], [n + 1, n]])) for n in (10, 20, 30)]
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    encoder.go.set()
    answers = [values(answer) for answer in await asyncio.gather(*others)]
    for n, out in zip((10, 20, 30), answers, strict=True):
        torch.testing.assert_close(out, torch.stack([vector([n]), vector([n + 1, n])]))
    await first
    assert gone.cancelled()
    assert len(encoder.given) == 2
    assert 4 not in torch.cat([ids.flatten() for ids, _ in encoder.given])


async def test_overload_is_said_and_passes(make) -> None:
    encoder = Gated()
    service = make(encoder, max_queued_tokens=5)
    first = asyncio.create_task(service.embed([3]))
    await asyncio.to_thread(encoder.started.wait, 20)
    second = asyncio.create_task(service.embed([3, 3, 3]))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match=r"3 tokens are waiting .* has 3; at most 5"):
        await service.embed([3, 3, 3])
    encoder.go.set()
    await asyncio.gather(first, second)
    await service.embed([3, 3, 3])


async def test_long_texts_are_tokenized_beside_the_event_loop(make) -> None:
    threads = []

    class Slow(Words):
        def encode(self, text):
            threads.append(threading.current_thread())
            return super().encode(text)

    service = make(tokenizer=Slow())
    await service.embed("a" * 40)
    await service.embed([" " * 5000])
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()
