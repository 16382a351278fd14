"""What of a checkpoint's files the generator follows when it embeds or judges, and what it refuses."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import tiny_checkpoint
from asgi import Exchange, until
from fake_engine import FakeEngine

from izh.config import ServerOptions
from izh.errors import ModelLoadError, OptionError, RequestError
from izh.outputs import PoolingOutput
from izh.pooling.metrics import PoolingMetrics
from izh.pooling.resident import _recipe
from izh.pooling.service import PoolingService
from izh.request import Entry
from izh.server.app import Server
from izh.server.asked import Asked
from izh.server.resident import ResidentServices, _groups
from izh.text.tokenizer import Tokenizer

POOLING, NORMALIZE = "sentence_transformers.models.Pooling", "sentence_transformers.models.Normalize"


def write(folder, modules, pooling, **transformer):
    kinds = ["sentence_transformers.models.Transformer", *modules]
    paths = ["", *(f"{i}_part" for i in range(1, len(kinds)))]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "name": str(i), "path": path, "type": kind}
                for i, (path, kind) in enumerate(zip(paths, kinds, strict=True))
            ]
        )
    )
    (folder / "1_part").mkdir()
    (folder / "1_part" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps(transformer))
    (folder / "config.json").write_text("{}")
    return folder


def test_a_chat_model_gives_its_last_row_of_length_one(tmp_path):
    recipe, length = _recipe(tmp_path, 100)
    assert (recipe.modes, recipe.normalize, recipe.prompts, length) == (("last",), True, {}, None)


def test_what_the_files_say_counts(tmp_path):
    write(tmp_path, [POOLING], {"pooling_mode_mean_tokens": True, "include_prompt": False}, max_seq_length=30)
    recipe, length = _recipe(tmp_path, 100)
    assert (recipe.modes, recipe.normalize, recipe.includes_prompt, length) == (("mean",), False, False, 30)
    (tmp_path / "sentence_bert_config.json").unlink()
    assert _recipe(tmp_path, 100)[1] == 100, "as sentence-transformers: what the tokenizer says"


@pytest.mark.parametrize(
    ("modules", "pooling", "transformer", "word"),
    [
        ([POOLING], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, {}, "side by side"),
        ([POOLING, NORMALIZE], {"pooling_mode": "lasttoken"}, {"do_lower_case": True}, "do_lower_case"),
        ([POOLING, "custom.Module"], {"pooling_mode": "lasttoken"}, {}, "custom"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path, modules, pooling, transformer, word):
    write(tmp_path, modules, pooling, **transformer)
    with pytest.raises(ModelLoadError, match=word):
        _recipe(tmp_path, 100)


def test_a_judge_needs_its_words():
    engine = FakeEngine()  # whose vocabulary has neither "yes" nor "no"
    with pytest.raises(OptionError, match='--reranker resident: "yes" and "no"'):
        ResidentServices(engine, reranks=True, metrics=PoolingMetrics())
    plain = tiny_checkpoint.tokenizer()
    plain.backend_tokenizer.add_tokens(["yes", "no"])
    engine.tokenizer = Tokenizer(plain)
    resident = ResidentServices(engine, reranks=True, metrics=PoolingMetrics())
    assert resident.reranks
    assert resident.reranker(None, Asked()).model_name == "fake"


def test_a_long_call_goes_in_groups():
    entries = [Entry([5] * length) for length in (1000, 1000, 100, 3000, 1, 2047, 2)]
    assert [[len(entry.ids) for entry in group] for group in _groups(entries)] == [
        [1000, 1000],
        [100],
        [3000],
        [1, 2047],
        [2],
    ]


class Waiting(FakeEngine):
    """Embeds nothing, ever: notes who begins and who ends. A prompt that begins with token 9 is refused."""

    def __init__(self):
        super().__init__()
        self.begun, self.ended = [], []

    async def embed(self, prompt, params=None, **_options):
        self.begun.append(prompt)
        try:
            await asyncio.sleep(0)
            if prompt[0] == 9:
                raise RequestError("token 9 is not liked", "prompt")
            await asyncio.Event().wait()
        finally:
            self.ended.append(prompt)


async def ask(engine, *prompts):
    server = Server(engine, ServerOptions())
    await server._start_models()
    return Exchange(server.app, "/v1/embeddings", {"input": list(prompts)})


async def test_the_prompts_of_a_client_who_leaves_are_aborted():
    engine = Waiting()
    exchange = await ask(engine, *([20 + i] * 250 for i in range(20)))
    await until(lambda: len(engine.begun) == 16)  # two groups of eight; the third does not begin before one has ended
    exchange.leave()
    await exchange.end()
    await until(lambda: sorted(engine.ended) == sorted(engine.begun))
    assert len(engine.begun) == 16


async def test_one_that_is_refused_ends_the_others():
    engine = Waiting()
    exchange = await ask(engine, [5, 6], [9], [7])
    await exchange.end()
    assert (exchange.status, b"token 9 is not liked" in exchange.body) == (400, True)
    assert sorted(engine.ended) == sorted(engine.begun) == [[5, 6], [7], [9]]


async def test_too_much_that_waits_is_refused_and_what_leaves_makes_room():
    engine = Waiting()
    server = Server(engine, ServerOptions())
    await server._start_models()
    server._services.resident.queued.most = 1000
    first = Exchange(server.app, "/v1/embeddings", {"input": [[5] * 250] * 6})  # an empty queue takes any call
    await until(lambda: len(engine.begun) == 6)
    for path, body in (
        ("/v1/embeddings", {"input": [7]}),
        ("/v1/embeddings", {"input": [7], "cache_salt": "own"}),
    ):
        second = Exchange(server.app, path, body)
        await second.end()
        assert (second.status, b"1500 tokens are waiting" in second.body) == (429, True), second.body
    assert len(engine.begun) == 6, "what is refused has begun nothing"
    first.leave()
    await first.end()
    await until(lambda: server._services.resident.queued.now == 0)
    third = Exchange(server.app, "/v1/embeddings", {"input": [9]})
    await third.end()
    assert third.status == 400
    assert server._services.resident.queued.now == 0


class Noting(FakeEngine):
    """Notes what it is asked besides."""

    def __init__(self):
        super().__init__()
        self.info = replace(self.info, adapters={"tuned": None})
        self.asked = []

    async def embed(self, prompt, params=None, **options):
        self.asked.append(options)
        return PoolingOutput("id", prompt, np.ones(2, np.float32))


async def test_what_a_request_asks_besides_reaches_the_engine():
    engine = Noting()
    server = Server(engine, ServerOptions())
    await server._start_models()
    for body in ({}, {"model": "tuned", "lora_scale": 0.5, "priority": -3, "cache_salt": "own"}, {"model": "tuned"}):
        exchange = Exchange(server.app, "/v1/embeddings", {"input": [5]} | body)
        await exchange.end()
        assert exchange.status == 200, exchange.body
    assert engine.asked == [
        {"adapters": (), "priority": 0, "cache_salt": None},
        {"adapters": (("tuned", 0.5),), "priority": -3, "cache_salt": "own"},
        {"adapters": (("tuned", 1.0),), "priority": 0, "cache_salt": None},
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_scale": 0.5}, "lora_scale"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": 2**40}, "priority"),
        ({"lora": "tuned"}, "lora"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(body, param):
    engine = Noting()
    server = Server(engine, ServerOptions())
    await server._start_models()
    exchange = Exchange(server.app, "/v1/embeddings", {"input": [5]} | body)
    await exchange.end()
    assert (exchange.status, json.loads(exchange.body)["error"]["param"]) == (400, param)
    assert engine.asked == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [5]}),
        ("/v1/rerank", {"query": "q", "documents": ["d"]}),
        ("/v1/score", {"text_1": "q", "text_2": "d"}),
    ],
)
@pytest.mark.parametrize("field", [{"lora_scale": 1.0}, {"priority": 1}, {"cache_salt": "own"}])
async def test_a_model_beside_the_generator_refuses_all_of_it_by_name(path, body, field):
    server = Server(Noting(), ServerOptions())
    server.embedder = server.reranker = PoolingService(None, None, "beside")
    await server._start_models()
    exchange = Exchange(server.app, path, body | field)
    await exchange.end()
    assert (exchange.status, json.loads(exchange.body)["error"]["param"]) == (400, *field)
    assert b"'beside' runs beside the generator" in exchange.body
