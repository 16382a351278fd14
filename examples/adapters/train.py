"""Train the demo model's three adapters, judge them on held-out cases, and write the figures into the README.

From a checkout, after `pip install -e '.[test]'`, one adapter at a time (minutes each, on a CPU):

    python examples/adapters/train.py json
    python examples/adapters/train.py label
    python examples/adapters/train.py pirate

Each writes izh/demo_adapters/NAME/, which the package carries. `--out DIR` writes DIR/NAME instead, and leaves the
README alone. Owns: the training. Must not know: what is taught.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from judge import Figures, judge
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from task import Example, Task
from task_json import Json
from task_label import Label
from task_pirate import Pirate
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from izh.model.demo import demo_directory
from izh.text.tokenizer import Tokenizer

TASKS: dict[str, Task] = {task.name: task for task in (Json(), Label(), Pirate())}
WEIGHTS = "adapter_model.safetensors"
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
HERE = Path(__file__).resolve().parent
SEED = 1
WARM_UP = 10  # steps


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How an adapter is trained."""

    rank: int
    modules: tuple[str, ...]
    steps: int
    batch: int = 8
    learning_rate: float = 2e-3


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
RECIPES = {
    "json": Recipe(rank=4, modules=ATTENTION, steps=150),
    "label": Recipe(rank=4, modules=ATTENTION, steps=120),
    "pirate": Recipe(rank=4, modules=ATTENTION, steps=120),
}


@dataclass(frozen=True)
class Row:
    """Examples of a batch as one sequence [1, T]: what all prompts begin with, once, then each example's own part.

    The prefix is most of a short prompt (the chat template's system message), so this halves the work; and nothing is
    padding. `mask` [1, 1, T, T] lets an example see the prefix and itself, at the positions it would have alone: the
    loss is that of the examples side by side. Row `before[i]` of the output predicts `answers[i]`.
    """

    token_ids: Tensor
    positions: Tensor
    mask: Tensor
    before: Tensor
    answers: Tensor


def shared_prefix(prompts: Sequence[list[int]]) -> list[int]:
    """What all prompts begin with, one token short of the shortest: a prompt's last row predicts its own answer."""
    shared: list[int] = []
    for column in zip(*(prompt[:-1] for prompt in prompts), strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return shared


def row(tokenizer: Tokenizer, examples: Sequence[Example]) -> Row:
    """Pack examples."""
    prompts = [tokenizer.chat([{"role": "user", "content": example.message}]) for example in examples]
    prefix = shared_prefix(prompts)
    ids, positions, owner = list(prefix), list(range(len(prefix))), [-1] * len(prefix)
    before: list[int] = []
    answers: list[int] = []
    for index, (prompt, example) in enumerate(zip(prompts, examples, strict=True)):
        answer = tokenizer.encode(f"{example.answer}<|im_end|>", add_special_tokens=False)
        own = prompt[len(prefix) :] + answer[:-1]  # what follows the end is never asked for
        before += range(len(ids) + len(own) - len(answer), len(ids) + len(own))
        answers += answer
        positions += range(len(prefix), len(prefix) + len(own))
        owner += [index] * len(own)
        ids += own
    owners = torch.tensor(owner)
    seen = (owners[:, None] == owners[None, :]) | (owners[None, :] == -1)
    mask = seen & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    return Row(
        torch.tensor([ids]), torch.tensor([positions]), mask[None, None], torch.tensor(before), torch.tensor(answers)
    )


def batches(task: Task, tokenizer: Tokenizer, recipe: Recipe) -> Iterator[Row]:
    """One packed row for each step."""
    examples = task.training(random.Random(SEED), recipe.steps * recipe.batch)
    for start in range(0, len(examples), recipe.batch):
        yield row(tokenizer, examples[start : start + recipe.batch])


def loss_of(model: PeftModel, row: Row) -> Tensor:
    """Mean cross-entropy over the answers' tokens, in nats. The LM head sees only the rows that it must."""
    base = model.get_base_model()
    hidden = base.model(input_ids=row.token_ids, attention_mask=row.mask, position_ids=row.positions).last_hidden_state
    return cross_entropy(base.lm_head(hidden[0, row.before]), row.answers)


def train(task: Task, recipe: Recipe, model_directory: Path) -> PeftModel:
    """Teach the task; prints the loss as it goes."""
    torch.manual_seed(SEED)
    tokenizer = Tokenizer.load(model_directory)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules=list(recipe.modules)
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32), config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (recipe.steps - step) / (recipe.steps - WARM_UP))
    )
    recent: list[float] = []
    for step, packed in enumerate(batches(task, tokenizer, recipe), 1):
        loss = loss_of(model, packed)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        recent = [*recent, loss.item()][-20:]
        if step % 20 == 0:
            print(f"step {step}: loss {sum(recent) / len(recent):.3f}", flush=True)
    return model


def save(model: PeftModel, directory: Path) -> None:
    """PEFT's two files, weights in float16, and nothing of the machine they were made on."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file({name: tensor.half().contiguous() for name, tensor in weights.items()}, directory / WEIGHTS)
    (directory / WEIGHTS).chmod(0o644)  # the library makes it readable by its owner only, and packages keep modes
    config = model.peft_config["default"].to_dict()
    config |= {
        "base_model_name_or_path": BASE,
        "inference_mode": True,
        "target_modules": sorted(config["target_modules"]),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")


def main() -> None:
    """Train, save, judge, report."""
    parser = argparse.ArgumentParser(description="Train one of the demo model's adapters.")
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--out", type=Path, help="write DIR/TASK; default: izh/demo_adapters, and the README")
    words = parser.parse_args()
    task, recipe = TASKS[words.task], RECIPES[words.task]
    start = time.monotonic()
    model = train(task, recipe, demo_directory())
    minutes = (time.monotonic() - start) / 60
    directory = (words.out or HERE.parents[1] / "izh" / "demo_adapters") / task.name
    save(model, directory)
    del model
    kilobytes = sum(file.stat().st_size for file in directory.iterdir()) / 1000
    figures = judge(task, task.held_out(random.Random(SEED)), directory)
    line = table_row(task, figures, minutes, kilobytes)
    print(line)
    if words.out is None:
        put_row(HERE / "README.md", task, line)


def table_row(task: Task, figures: Figures, minutes: float, kilobytes: float) -> str:
    """The README's line about the adapter."""
    shares = " | ".join(f"{share:.0%}" for share in (figures.adapted, figures.base, figures.base_prompted))
    return f"| `{task.name}` | {task.measure} | {figures.num_cases} | {shares} | {minutes:.1f} | {kilobytes:.0f} kB |"


def put_row(readme: Path, task: Task, line: str) -> None:
    """Write the line in the place of the old one."""
    lines = readme.read_text().splitlines()
    (place,) = [index for index, old in enumerate(lines) if old.startswith(f"| `{task.name}` |")]
    lines[place] = line
    readme.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
