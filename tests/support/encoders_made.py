"""Tiny random encoders of each family, made with transformers, with a real tokenizer beside them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    ModernBertConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    XLMRobertaConfig,
)

FAMILIES = ("bert", "roberta", "xlm-roberta", "modernbert")
TEXTS = ["the quick brown fox jumps over the lazy dog", "a query, and a document: für Äpfel 日本", "def f(x): return x"]
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A small vocabulary with the family's own way of marking single texts and pairs."""
    is_bert = family in ("bert", "modernbert")
    first, last, pad, unknown = ("[CLS]", "[SEP]", "[PAD]", "[UNK]") if is_bert else ("<s>", "</s>", "<pad>", "<unk>")
    special = [pad, unknown, first, last] if is_bert else [first, pad, last, unknown]
    made = Tokenizer(models.BPE(unk_token=unknown))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(TEXTS * 10, trainers.BpeTrainer(vocab_size=160, special_tokens=special))
    pair = f"{first} $A {last} $B:1 {last}:1" if is_bert else f"{first} $A {last} {last} $B {last}"
    ids = [(token, made.token_to_id(token)) for token in (first, last)]
    made.post_processor = processors.TemplateProcessing(single=f"{first} $A {last}", pair=pair, special_tokens=ids)
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if family == "bert" else ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        cls_token=first,
        sep_token=last,
        pad_token=pad,
        unk_token=unknown,
        model_max_length=60,
        model_input_names=inputs,
    )


def config(family: str, **options: Any) -> Any:
    made = tokenizer(family)
    fields = SIZES | {"vocab_size": len(made), "pad_token_id": made.pad_token_id} | options
    if family == "modernbert":
        fields |= {"max_position_embeddings": 64, "local_attention": 8, "cls_token_id": 2, "sep_token_id": 3}
        return ModernBertConfig(**fields, bos_token_id=2, eos_token_id=3)
    kinds = {"bert": BertConfig, "roberta": RobertaConfig, "xlm-roberta": XLMRobertaConfig}
    fields |= {"max_position_embeddings": 66, "type_vocab_size": 2 if family == "bert" else 1}
    return kinds[family](**fields)


def save(folder: Path, family: str, num_labels: int | None = None, **options: Any) -> Any:
    """Write a random float32 checkpoint with its tokenizer; returns the transformers model. `num_labels` makes it a
    sequence classifier."""
    torch.manual_seed(7)
    made = config(family, **options, **({} if num_labels is None else {"num_labels": num_labels}))
    auto = AutoModel if num_labels is None else AutoModelForSequenceClassification
    model = auto.from_config(made, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.2 if parameter.dim() == 1 else 0.15)
    model.save_pretrained(folder)
    tokenizer(family).save_pretrained(folder)
    return model
