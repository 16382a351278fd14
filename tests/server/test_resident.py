"""What of a checkpoint's files the generator follows when it embeds or judges, and what it refuses."""

import asyncio
import json

import pytest
import tiny_checkpoint
from asgi import Exchange, until
from fake_engine import FakeEngine

from izh.config import ServerOptions
from izh.errors import ModelLoadError, OptionError, RequestError
from izh.pooling.metrics import PoolingMetrics
from izh.request import Entry
from izh.server.app import Server
from izh.server.resident import Resident, _groups, _recipe
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
        Resident(engine, reranks=True, metrics=PoolingMetrics())
    plain = tiny_checkpoint.tokenizer()
    plain.backend_tokenizer.add_tokens(["yes", "no"])
    engine.tokenizer = Tokenizer(plain)
    resident = Resident(engine, reranks=True, metrics=PoolingMetrics())
    assert resident.reranks
    assert resident.reranker(None).model_name == "fake"


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
