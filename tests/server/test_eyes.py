"""Which eyes a server gets: a directory's for a text model, its own for a checkpoint that has some, or none."""

import httpx
import pytest
import seeing
import tiny_checkpoint
import torch
from seeing import PLACEHOLDER, SECTIONS, image, picture, text, uri, user
from serving import serving

from izh.engine.async_llm import AsyncLLM
from izh.errors import OptionError
from izh.multimodal import VisionConfig, VisionEncoder, VisionPath
from izh.server import eyes
from izh.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint.save_llama(tmp_path_factory.mktemp("model") / "tiny")


def test_a_text_model_sees_through_the_directory_given(folder, tmp_path):
    seeing.path(folder).save(tmp_path)
    llm = AsyncLLM(model=str(folder), kv_cache_gb=0.02, num_threads=1)
    messages = [user(text("what is this?"), image(uri(picture(1))))]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    said = []
    with serving(llm, vision=str(tmp_path)) as url, httpx.Client(base_url=url, timeout=60) as client:
        (card,) = client.get("/v1/models").json()["data"]
        assert card["input_modalities"] == ["text", "image"]
        said.append(client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])
    llm = AsyncLLM(model=str(folder), kv_cache_gb=0.02, num_threads=1)
    with (
        serving(llm, multimodal_processor=seeing.path(folder)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        said.append(client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])
    assert said[0] == said[1]


def test_a_model_without_eyes_says_so_and_refuses(folder):
    llm = AsyncLLM(model=str(folder), kv_cache_gb=0.02, num_threads=1)
    with serving(llm) as url, httpx.Client(base_url=url, timeout=60) as client:
        (card,) = client.get("/v1/models").json()["data"]
        assert card["input_modalities"] == ["text"]
        body = {"model": "tiny", "messages": [user(image(uri(picture(1))))]}
        assert client.post("/v1/chat/completions", json=body).status_code == 400


def test_eyes_for_another_model_are_refused(folder, tmp_path):
    tokenizer = Tokenizer.load(folder)
    torch.manual_seed(0)
    wide = VisionConfig(image_size=16, patch_size=4, width=32, heads=2, layers=1, output_width=72)
    VisionPath(tokenizer, VisionEncoder(wide), PLACEHOLDER, SECTIONS).save(tmp_path / "wide")
    with pytest.raises(OptionError, match=r"rows of 72 numbers, but .* takes 64"):
        eyes.load_eyes(str(folder), tokenizer, str(tmp_path / "wide"))
    VisionPath(tokenizer, seeing.encoder(), PLACEHOLDER, (16, 8, 8)).save(tmp_path / "turns")
    with pytest.raises(OptionError, match=r"turns 32 frequency pairs, but .* has 8"):
        eyes.load_eyes(str(folder), tokenizer, str(tmp_path / "turns"))


def test_a_checkpoint_with_a_tower_keeps_its_own(folder, monkeypatch, tmp_path):
    own = object()
    monkeypatch.setattr(eyes, "is_vision_model", lambda directory: directory == folder)
    monkeypatch.setattr(eyes.VisionModel, "load", lambda directory: own)
    tokenizer = Tokenizer.load(folder)
    assert eyes.load_eyes(str(folder), tokenizer, None) is own
    with pytest.raises(OptionError, match="has a vision tower of its own; leave it out"):
        eyes.load_eyes(str(folder), tokenizer, str(tmp_path))
