"""The demo model, served with the eyes it comes with: digits and shapes that training never saw, over HTTP; and what it
says without an image is what it says without eyes, to the last bit."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from seeing import image, text, uri, user
from serving import serving

from izh import LLM, SamplingParams
from izh.engine.async_llm import AsyncLLM

EXAMPLES = Path(__file__).parents[2] / "examples" / "vision"
CHAT = "/v1/chat/completions"
PLAIN = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS = {"kv_cache_gb": 0.25, "num_threads": 1}


@pytest.fixture(scope="module")
def scenes():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import scenes

        yield scenes


@pytest.fixture(scope="module")
def http():
    llm = AsyncLLM(model="demo", **OPTIONS)
    with serving(llm, vision="demo") as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


def ask(http, messages, **options):
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 12} | options
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(http, asked):
    """Answers to (picture, question) pairs, asked at the same time."""
    messages = [[user(image(uri(picture.image)), text(question))] for picture, question in asked]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: ask(http, each), messages))
    return [answer["choices"][0]["message"]["content"] for answer in answers]


def test_plain_chat_is_what_it_is_without_eyes(http):
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
    alone = LLM("demo", quiet=True, **OPTIONS).chat(PLAIN, params)[0].outputs[0]
    (choice,) = ask(http, PLAIN, logprobs=True)["choices"]
    assert choice["message"]["content"] == alone.text
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [e.logprob for e in alone.logprobs]


def test_held_out_digits_are_read(http, scenes):
    draw = random.Random(5)
    held_out = scenes.held_out_digits()
    asked = [
        (scenes.picture_of_digit(*held_out[i], draw, size), question)
        for i, size, question in zip(
            range(0, 240, 20),
            (8, 16, 32, 64, 128, 400) * 2,
            ("What digit is this?", "Which number do you see?") * 6,
            strict=True,
        )
    ]
    right = [answer == str(picture.scene.digit) for answer, (picture, _) in zip(said(http, asked), asked, strict=True)]
    assert sum(right) >= 11


def test_shapes_are_told(http, scenes):
    draw = random.Random(5)
    asked, wanted = [], []
    for _ in range(5):
        picture = scenes.picture_of_shapes(scenes.any_shapes(draw), draw, scenes.any_size(draw, 32))
        for question, fact in (
            ("What colour is the shape?", picture.scene.colour),
            ("Which shape do you see?", picture.scene.shape),
            ("How many shapes are there?", str(picture.scene.count)),
        ):
            asked.append((picture, question))
            wanted.append(fact)
    assert sum(answer == fact for answer, fact in zip(said(http, asked), wanted, strict=True)) >= len(wanted) - 1


def test_the_model_says_that_it_takes_images(http):
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert cards["demo"]["input_modalities"] == ["text", "image"]
