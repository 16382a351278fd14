"""Small tokenizers of every kind, built in place."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from izh.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "the dog sleeps; the fox does not, and that is that.",
    "こんにちは世界。日本語の文章です。",
    "Emoji: 😀 👩‍👩‍👧 🇫🇷 naïve café ",
    "  two  spaces\n\tand a tab ",
]
SENTENCE_PIECES = ["▁", "▁the", "▁fox", "▁dog", "the", "fox", "s", ".", ",", "日", "本", "▁▁", "é", "a", "b", "o"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('tool messages are not supported') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n"
    "{% if m.reasoning_content is defined %}<think>{{ m['reasoning_content'] }}</think>{% endif %}"
    "{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if shout %}HEY {% endif %}{% endif %}"
)


def _added(backend: Backend) -> Backend:
    backend.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["<tool>", "two words", AddedToken("<sep>", normalized=False)])
    return backend


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    _added(backend)
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return backend


def _sentence_pieces(byte_tokens: bool, decoder: decoders.Decoder) -> Backend:
    pieces = ["<unk>"] + ([f"<0x{byte:02X}>" for byte in range(256)] if byte_tokens else []) + SENTENCE_PIECES
    vocab = [(piece, -float(rank)) for rank, piece in enumerate(pieces)]
    backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=byte_tokens))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder
    return _added(backend)


def _words(model: models.Model, decoder: decoders.Decoder | None) -> Backend:
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    return _added(backend)


WORDS = {word: i for i, word in enumerate(["[UNK]", "the", "fox", "##es", "dog", ".", "jump", "##ed", ",", "日"])}
ENDED = {word: i for i, word in enumerate(["the</w>", "fo", "x</w>", "dog</w>", "s", ".</w>", "日"])}

BUILDERS: dict[str, Callable[[], Backend]] = {
    "byte_level": byte_level,
    "llama": lambda: _sentence_pieces(
        True,
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    ),
    "gemma": lambda: _sentence_pieces(
        True, decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "metaspace": lambda: _sentence_pieces(False, decoders.Metaspace()),
    "metaspace_never": lambda: _sentence_pieces(False, decoders.Metaspace(prepend_scheme="never")),
    "metaspace_bytes": lambda: _sentence_pieces(
        True, decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "no_decoder": lambda: _words(models.WordLevel(WORDS, unk_token="[UNK]"), None),
    "word_piece": lambda: _words(models.WordPiece(WORDS, unk_token="[UNK]"), decoders.WordPiece()),
    "bpe_suffix": lambda: _words(models.BPE(ENDED, [], end_of_word_suffix="</w>"), decoders.BPEDecoder()),
}


@pytest.fixture(scope="session")
def backends() -> dict[str, Backend]:
    return {name: build() for name, build in BUILDERS.items()}


@pytest.fixture(scope="session", params=list(BUILDERS))
def backend(request: pytest.FixtureRequest, backends: dict[str, Backend]) -> Backend:
    return backends[request.param]


def save(backend: Backend, path: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    hf.chat_template = chat_template
    hf.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model_dir(backends: dict[str, Backend], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a byte-level tokenizer and a chat template."""
    return save(backends["byte_level"], tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="session")
def bare_tokenizer(backends: dict[str, Backend], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Sentence pieces with byte fallback, without a chat template."""
    return Tokenizer.load(save(backends["llama"], tmp_path_factory.mktemp("llama"), chat_template=None))
