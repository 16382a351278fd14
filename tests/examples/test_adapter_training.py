"""How the demo's adapters are trained: held out is held out, and packed examples teach what each alone would."""

import random
from pathlib import Path

import example_modules
import pytest
import tiny_checkpoint
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from izh.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "adapters"


@pytest.fixture(autouse=True)
def examples_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    example_modules.make_importable(monkeypatch, FOLDER)


def test_no_held_out_case_has_templates_or_words_of_the_training() -> None:
    import task_json
    import task_label
    import task_pirate

    for one, other in (
        (task_json.TEMPLATES, task_json.HELD_OUT_TEMPLATES),
        (task_json.FIRST, task_json.HELD_OUT_FIRST),
        (task_json.LAST, task_json.HELD_OUT_LAST),
        (task_json.CITIES, task_json.HELD_OUT_CITIES),
        (task_label.ITEMS, task_label.HELD_OUT_ITEMS),
        ([text for texts in task_label.TRAINING.values() for text in texts], sum(task_label.HELD_OUT.values(), ())),
        ([question for question, _ in task_pirate.PLAIN], task_pirate.HELD_OUT),
    ):
        assert set(one).isdisjoint(other)
        assert len(set(one)) == len(one)
        assert len(set(other)) == len(other)


@pytest.mark.parametrize(("name", "share"), [("json", 1.0), ("label", 1.0), ("pirate", 0.9)])
def test_what_is_taught_counts_as_right(name: str, share: float) -> None:
    """The measures accept the wanted answers (a few of the pirate's have one word of his only), and no other."""
    import train

    task = train.TASKS[name]
    examples = task.training(random.Random(5), 200)
    assert sum(task.is_right(example, example.answer) for example in examples) >= share * len(examples)
    assert not task.is_right(examples[0], "I am an assistant, and I am happy to help.")
    assert not task.is_right(examples[0], "")


def test_packed_examples_have_the_loss_of_each_alone(tmp_path: Path) -> None:
    import train

    tiny_checkpoint.save_llama(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    examples = train.TASKS["label"].training(random.Random(5), 5)
    packed = train.row(tokenizer, examples)
    total, num_tokens, num_alone = torch.zeros(()), 0, 0
    for example in examples:
        prompt = tokenizer.chat([{"role": "user", "content": example.message}])
        answer = tokenizer.encode(f"{example.answer}<|im_end|>", add_special_tokens=False)
        ids = torch.tensor([prompt + answer])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        total = total + cross_entropy(logits, ids[0, len(prompt) :], reduction="sum")
        num_tokens += len(answer)
        num_alone += ids.shape[1] - 1
    assert packed.token_ids.shape[1] < num_alone
    torch.testing.assert_close(train.loss_of(model, packed), total / num_tokens, rtol=1e-5, atol=1e-6)
