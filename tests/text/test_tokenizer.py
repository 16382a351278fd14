"""The tokenizer against `transformers`, and what it refuses."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from izh.errors import ModelLoadError, RequestError
from izh.text.pieces import Joining, joining
from izh.text.tokenizer import Tokenizer

TEXTS = ["the quick fox", " leading space", "日本語 😀 naïve", "<|im_start|>user\nhi<|im_end|>", "", "\x00\t\n"]
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox?"}]


def shown(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_are_those_of_transformers(tokenizer: Tokenizer, model_dir: Path, text: str) -> None:
    hf = AutoTokenizer.from_pretrained(model_dir)
    for add_special_tokens in (True, False):
        token_ids = tokenizer.encode(text, add_special_tokens)
        assert token_ids == hf.encode(text, add_special_tokens=add_special_tokens)
        for skip in (True, False):
            assert tokenizer.decode(token_ids, skip) == hf.decode(token_ids, skip_special_tokens=skip)


def test_sizes_and_special_tokens(tokenizer: Tokenizer, model_dir: Path) -> None:
    hf = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.vocab_size == len(hf)
    assert tokenizer.special_ids == set(hf.all_special_ids) | {hf.convert_tokens_to_ids("<|im_start|>")}
    assert tokenizer.eos_token_id == hf.eos_token_id


def test_truncation_and_padding_of_the_file_are_off(backends: dict[str, Backend], tmp_path: Path) -> None:
    backend = Backend.from_str(backends["byte_level"].to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|im_end|>").save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer.truncation is not None
    tokenizer = Tokenizer.load(tmp_path)
    assert len(tokenizer.encode("z" * 10, add_special_tokens=False)) == 10


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


def test_ids_out_of_range(tokenizer: Tokenizer, bare_tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""
    assert tokenizer.piece(tokenizer.vocab_size + 5) == ("", b"")
    assert bare_tokenizer.decode([-1]) == ""
    with pytest.raises(RequestError, match=r"between 0 and 2\*\*32 - 1"):
        tokenizer.decode([-1])


def test_pieces_of_byte_level_tokens(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokenizer.piece(i)[1] for i in token_ids) == text.encode()
    for token_id, byte in zip(tokenizer.encode("ß", add_special_tokens=False), "ß".encode(), strict=True):
        assert tokenizer.piece(token_id) == (f"\\x{byte:02x}", bytes([byte]))
    assert tokenizer.piece(tokenizer.encode("<|im_end|>", False)[0]) == ("<|im_end|>", b"<|im_end|>")


def test_pieces_of_sentence_piece_tokens(bare_tokenizer: Tokenizer, backends: dict[str, Backend]) -> None:
    id_of = backends["llama"].token_to_id
    assert bare_tokenizer.piece(id_of("▁the")) == (" the", b" the")
    assert bare_tokenizer.piece(id_of("日")) == ("日", "日".encode())
    assert bare_tokenizer.piece(id_of("<0xE3>")) == ("\\xe3", b"\xe3")
    assert bare_tokenizer.piece(id_of("<0x41>")) == ("A", b"A")
    assert bare_tokenizer.piece(id_of("<s>")) == ("<s>", b"<s>")


def test_decode_keeps_the_characters_before_a_cut_one(bare_tokenizer: Tokenizer, backends: dict[str, Backend]) -> None:
    token_ids = [backends["llama"].token_to_id(f"<0x{byte:02X}>") for byte in "မြ".encode()[:-1]]
    assert bare_tokenizer.decode(token_ids) == "မ\ufffd\ufffd"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("byte_level", Joining(kind="bytes")),
        ("llama", Joining(kind="spaces", byte_fallback=True, strip=1)),
        ("gemma", Joining(kind="spaces", byte_fallback=True)),
        ("metaspace", Joining(kind="spaces", bare_first=True)),
        ("metaspace_never", Joining(kind="spaces")),
        ("metaspace_bytes", Joining(kind="spaces", byte_fallback=True, bare_first=True)),
        ("no_decoder", Joining(kind="other")),
    ],
)
def test_known_decoders_are_recognised(backends: dict[str, Backend], name: str, expected: Joining) -> None:
    assert joining(backends[name].decoder) == expected


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Metaspace(replacement="_"),
        decoders.CTC(),
    ],
    ids=str,
)
def test_decoders_that_differ_in_a_step_are_left_to_the_library(decoder: decoders.Decoder) -> None:
    assert joining(decoder).kind == "other"


def test_chat_is_the_templates_text_without_a_second_bos(tokenizer: Tokenizer, model_dir: Path) -> None:
    token_ids = tokenizer.chat(MESSAGES)
    assert token_ids == AutoTokenizer.from_pretrained(model_dir).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    assert shown(tokenizer, token_ids) == (
        "<s><|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nthe fox?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_options(tokenizer: Tokenizer) -> None:
    half = [*MESSAGES, {"role": "assistant", "content": "It jum"}]
    text = shown(tokenizer, tokenizer.chat(half, add_generation_prompt=False, continue_final_message=True))
    assert text.endswith("<|im_start|>assistant\nIt jum")
    assert shown(tokenizer, tokenizer.chat(MESSAGES, template_kwargs={"shout": True})).endswith("assistant\nHEY ")
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {}}}]
    assert "lookup " in shown(tokenizer, tokenizer.chat(MESSAGES, tools=tools))


def test_chat_keeps_reasoning_and_tool_calls(tokenizer: Tokenizer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    answer = {"role": "assistant", "content": "ok", "reasoning_content": "hm", "tool_calls": [call]}
    text = shown(tokenizer, tokenizer.chat([*MESSAGES, answer], add_generation_prompt=False))
    assert '<think>hm</think>ok{"x": "é"}<|im_end|>' in text


@pytest.mark.parametrize(
    ("messages", "options", "match"),
    [
        ([], {}, "at least one message"),
        ([{"role": "tool", "content": "x"}], {}, "tool messages are not supported"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], {}, "chat template refused.*undefined|no attribute"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, r"messages\[0\].content\[0\].*image_url"),
        (MESSAGES, {"continue_final_message": True}, "both true"),
        (MESSAGES, {"template_kwargs": {"tokenize": True, "messages": []}}, "may not set messages, tokenize"),
    ],
)
def test_chat_refuses(tokenizer: Tokenizer, messages: list[dict], options: dict, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        tokenizer.chat(messages, **options)


def test_chat_without_a_template(bare_tokenizer: Tokenizer, tokenizer: Tokenizer) -> None:
    assert tokenizer.has_chat_template
    assert not bare_tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        bare_tokenizer.chat(MESSAGES)


def test_many_threads_get_what_one_gets(tokenizer: Tokenizer) -> None:
    def work(i: int) -> tuple[list[int], list[int]]:
        text = f"the fox {i} 日本" * (i % 7 + 1)
        return tokenizer.encode(text), tokenizer.chat([{"role": "user", "content": text}])

    alone = [work(i) for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(200))) == alone


def no_directory(path: Path) -> Path:
    return path / "missing"


def empty_directory(path: Path) -> Path:
    return path


def broken_file(path: Path) -> Path:
    (path / "tokenizer.json").write_text("{")
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


def broken_gguf(path: Path) -> Path:
    (path / "x.gguf").write_bytes(b"GGUF")
    return path / "x.gguf"


@pytest.mark.parametrize("make", [no_directory, empty_directory, broken_file, broken_gguf])
def test_what_cannot_be_loaded_is_named(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(ModelLoadError, match=str(path)):
        Tokenizer.load(path)


def test_a_gguf_file_carries_its_tokenizer(tmp_path: Path) -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġthe", "<|end|>"]
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["t h", "th e", "Ġ the"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = Tokenizer.load(tmp_path / "tiny.gguf")
    assert tokenizer.encode("the the", add_special_tokens=False) == [tokens.index("the"), tokens.index("Ġthe")]
    assert tokenizer.decode(tokenizer.encode("日本 the")) == "日本 the"
    assert tokenizer.eos_token_id == tokens.index("<|end|>")
    chat = tokenizer.chat([{"role": "user", "content": "the"}])
    assert chat == [tokens.index("the"), tokens.index("<|end|>")]
