"""Adapters over HTTP: chosen by `lora` or by `model`, listed, and refused clearly."""

import adapters_made
import httpx
import openai
import pytest
import tiny_checkpoint
from serving import serving

from izh.engine.async_llm import AsyncLLM

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("http")
    checkpoint = tiny_checkpoint.save_llama(root / "tiny")
    for seed, name in enumerate(("support", "coding")):
        adapters_made.make(checkpoint, root / name, seed)
    return root


@pytest.fixture(scope="module")
def url(folders):
    lora = tuple(f"{name}={folders / name}" for name in ("support", "coding"))
    with serving(AsyncLLM(model=str(folders / "tiny"), kv_cache_gb=0.02, num_threads=1, lora=lora)) as url:
        yield url


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def ask(http, **body):
    given = {"prompt": "the quick brown", "max_tokens": 12, "temperature": 0, "ignore_eos": True} | body
    answer = http.post(TEXT, json=given)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_an_adapter_is_chosen_by_lora_or_by_model(http):
    base, support, coding = ask(http), ask(http, lora="support"), ask(http, lora="coding")
    assert len({base, support, coding}) == 3
    assert ask(http, model="support") == support
    assert ask(http, model="coding", lora="coding") == coding
    assert ask(http, model="tiny", lora="coding") == coding
    assert ask(http, model="tiny") == base


def test_scales_and_lists(http):
    support = ask(http, lora="support")
    assert ask(http, lora="support", lora_scale=1.0) == support
    assert ask(http, lora="support", lora_scale=0.0) == ask(http)
    assert ask(http, lora=[{"name": "support"}]) == support
    mixed = ask(http, lora=[{"name": "support", "scale": 0.7}, {"name": "coding", "scale": 0.3}])
    assert mixed == ask(http, lora=[{"name": "support", "scale": 0.7}, {"name": "coding", "scale": 0.3}])


def test_the_openai_client_lists_and_uses_adapters(url, folders):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        cards = {card.id: card for card in client.models.list().data}
        assert set(cards) == {"tiny", "support", "coding"}
        assert cards["support"].parent == "tiny"
        assert cards["support"].root == str(folders / "support")
        assert cards["tiny"].parent is None
        answers = [
            client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "hello"}], max_tokens=8, temperature=0
            )
            for name in cards
        ]
        assert len({answer.choices[0].message.content for answer in answers}) == 3
        assert [answer.model for answer in answers] == list(cards)


@pytest.mark.parametrize(
    ("body", "status", "param", "text"),
    [
        ({"lora": "missing"}, 404, "lora", "adapter 'missing' is not loaded here; loaded: 'coding', 'support'"),
        ({"model": "missing"}, 404, "model", "served: 'tiny', 'support', 'coding'"),
        ({"lora": "/etc"}, 404, "lora", "not loaded here"),
        ({"lora": 3}, 400, "lora", "an adapter's name"),
        ({"lora": [{"slot": 1}]}, 400, "lora", "slot is not a field"),
        ({"model": "support", "lora": "coding"}, 400, "lora", "give one of them"),
        ({"lora_scale": 0.5}, 400, "lora_scale", "names an adapter"),
        ({"lora": [{"name": "support"}], "lora_scale": 2}, 400, "lora_scale", "its own scale"),
    ],
)
def test_what_cannot_be_is_said(http, body, status, param, text):
    answer = http.post(TEXT, json={"prompt": "x", "max_tokens": 2} | body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert text in error["message"]
    assert error["param"].startswith(param)
