"""A tiny random model with a real tokenizer and chat template, for tests of everything around the arithmetic."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges; ids 0..2 are pad, <|im_start|>, <|im_end|> (end of sequence)."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = ["the quick brown fox jumps over the lazy dog", "user assistant system hello world", "für Äpfel 日本 🙂"]
    bpe.train_from_iterator(text * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<|im_end|>", chat_template=TEMPLATE
    )


def save_llama(folder: Path, seed: int = 0, **config: object) -> Path:
    """Write a random Llama checkpoint (2 layers, 64 wide, 256 positions) with the tokenizer; returns `folder`."""
    made = tokenizer()
    options = {
        "vocab_size": len(made),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "initializer_range": 0.5,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**(options | config))).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder
