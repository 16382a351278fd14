"""Train the demo's reranker on manual pages, judge it on pages it never saw, and write the figures into the README.

From a checkout on Debian 12, after `pip install -e '.[test]'` (about half an hour on a busy CPU core):

    python examples/reranker/train.py

It writes izh/demo_reranker/, which the package carries. `--out DIR` writes DIR instead, and leaves the README alone.
Owns: the recipe and the training. Must not know: how pages are read, how the reranker is judged.

The score of a pair begins as what the embedder's own geometry gives without any training: each token of the query is
compared with the token of the document that is most like it, all of them seen by both sides through attention.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from corpus import Page, pages
from judge import judge, search, table, vectors
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, BertModel

from izh.model.demo_embedder import demo_embedder_directory
from izh.model.packages import cache_root

HERE = Path(__file__).resolve().parent
BASE = "sentence-transformers/all-MiniLM-L6-v2"
SEED = 1
STEPS = 200
QUERIES, NEGATIVES = 4, 5  # of a step; passages of each query besides the right one
HARD = 20  # negatives are among the embedder's first so many
MAX_LENGTH = 80  # tokens of a pair, in training alone
RANK = 8
LEARNING_RATE, HEAD_LEARNING_RATE, WARM_UP = 5e-4, 2e-3, 20
FIRST_SCALE = 20.0
CENTRED = 50  # lists that the bias is taken from


class Head(nn.Module):
    """Score of a pair: sum over its query's rows of weight times likeness, times a scale, plus a line through [CLS].

    A query row's likeness is its cosine with the document row nearest to it. The weights sum to 1. Query rows are those
    of type 0, [CLS] and the [SEP] between included; document rows those of type 1.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weigh = nn.Parameter(torch.zeros(size))
        self.cls = nn.Parameter(torch.zeros(size))
        self.log_scale = nn.Parameter(torch.tensor(FIRST_SCALE).log())
        self.register_buffer("bias", torch.zeros(()))  # does not change an order, so no loss over one list teaches it

    def forward(self, hidden: Tensor, mask: Tensor, types: Tensor) -> Tensor:
        """hidden [N, T, D], mask and types [N, T] -> [N]."""
        unit = F.normalize(hidden, dim=-1)
        is_document = (mask * types).bool()
        likeness = (unit @ unit.transpose(1, 2)).masked_fill(~is_document[:, None], -1).amax(2)
        is_query = (mask * (1 - types)).bool()
        weights = (hidden @ self.weigh).masked_fill(~is_query, -torch.inf).softmax(1)
        return self.log_scale.exp() * (weights * likeness).sum(1) + hidden[:, 0] @ self.cls + self.bias


class Scorer(nn.Module):
    """MiniLM with an adapter, and the head. All tokens are of type 0 to MiniLM, which never saw another."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["query", "key", "value", "dense"])
        base = BertModel.from_pretrained(directory, add_pooling_layer=False, dtype=torch.float32)
        self.encoder: PeftModel = get_peft_model(base, config)
        self.head = Head(base.config.hidden_size)
        self.eval()  # no dropout: it would blur the geometry that this begins with

    def forward(self, pairs: Sequence[tuple[str, str]]) -> Tensor:
        """Scores [N]."""
        given = self.tokenizer(
            [query for query, _ in pairs],
            [document for _, document in pairs],
            truncation="longest_first",
            max_length=MAX_LENGTH,
            padding=True,
            return_tensors="pt",
        )
        ids, mask = given["input_ids"], given["attention_mask"]
        hidden = self.encoder(input_ids=ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids))
        return self.head(hidden.last_hidden_state, mask, given["token_type_ids"])


def groups(train: Sequence[Page], found: Tensor) -> list[list[tuple[str, str]]]:
    """One list of pairs for each query of the training, shuffled: the right passage first, then hard negatives.

    `found` [N, K] are the embedder's first passages for each query.
    """
    generator = random.Random(SEED)
    made = []
    for index, page in enumerate(train):
        others = [other for other in found[index].tolist() if other != index][:HARD]
        wrong = generator.sample(others, NEGATIVES)
        made.append([(page.query, train[other].passage) for other in (index, *wrong)])
    generator.shuffle(made)
    return made


def train(scorer: Scorer, lists: Sequence[list[tuple[str, str]]], steps: int, directory: Path) -> None:
    """Listwise softmax: of each list the first pair should score highest. Prints the loss and saves as it goes."""
    adapter = [parameter for parameter in scorer.encoder.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": adapter, "lr": LEARNING_RATE},
            {"params": list(scorer.head.parameters()), "lr": HEAD_LEARNING_RATE},
        ],
        weight_decay=0.01,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (steps - step) / (steps - WARM_UP))
    )
    start, recent = time.monotonic(), list[float]()
    for step in range(1, steps + 1):
        first = (step - 1) * QUERIES
        chosen = [lists[index % len(lists)] for index in range(first, first + QUERIES)]
        scores = scorer([pair for each in chosen for pair in each]).view(QUERIES, 1 + NEGATIVES)
        loss = F.cross_entropy(scores, torch.zeros(QUERIES, dtype=torch.int64))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent = [*recent, loss.item()][-50:]
        if step % 25 == 0:
            print(f"step {step}: loss {sum(recent) / len(recent):.3f}, {time.monotonic() - start:.0f} s", flush=True)
            save(scorer, directory)
    centre(scorer, lists[:CENTRED])
    save(scorer, directory)


@torch.no_grad()
def centre(scorer: Scorer, lists: Sequence[list[tuple[str, str]]]) -> None:
    """Set the bias such that the sigmoids of the scores sum to the number of right pairs: the likeliest bias."""
    scores = torch.cat([scorer(each) for each in lists])
    low, high = -scores.max() - 20, -scores.min() + 20
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if (scores + middle).sigmoid().sum() < len(lists) else (low, middle)
    scorer.head.bias += middle


def save(scorer: Scorer, directory: Path) -> None:
    """PEFT's two files with weights in float16, the head beside them, and nothing of the machine they were made on."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = get_peft_model_state_dict(scorer.encoder, save_embedding_layers=False)
    save_file(
        {name: each.half().contiguous() for name, each in weights.items()}, directory / "adapter_model.safetensors"
    )
    head = scorer.head
    tensors = {"weigh": head.weigh, "cls": head.cls, "scale": head.log_scale.exp(), "bias": head.bias}
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, directory / "head.safetensors")
    for file in directory.glob("*.safetensors"):
        file.chmod(0o644)  # the library makes it readable by its owner only, and packages keep modes
    config = scorer.encoder.peft_config["default"].to_dict()
    config |= {
        "base_model_name_or_path": BASE,
        "inference_mode": True,
        "target_modules": sorted(config["target_modules"]),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")


def main() -> None:
    """Read, mine, train, save, judge, report."""
    parser = argparse.ArgumentParser(description="Train the demo's reranker.")
    parser.add_argument("--out", type=Path, help="write here; default: izh/demo_reranker, and the README")
    parser.add_argument("--steps", type=int, default=STEPS)
    words = parser.parse_args()
    torch.manual_seed(SEED)
    folder = cache_root() / "reranker-pages"
    every = pages(folder)
    trained = [page for page in every if page.split == "train"]
    embedded = vectors([*(page.query for page in trained), *(page.passage for page in trained)])
    found = search(*embedded.split(len(trained)), HARD + 1)
    directory = words.out or HERE.parents[1] / "izh" / "demo_reranker"
    start = time.monotonic()
    train(Scorer(demo_embedder_directory()), groups(trained, found), words.steps, directory)
    minutes = (time.monotonic() - start) / 60
    report = table(judge([page for page in every if page.split != "train"], directory))
    print(f"{report}\ntrained for {minutes:.0f} minutes")
    if words.out is None:
        put(HERE / "README.md", report)


def put(readme: Path, report: str) -> None:
    """Write the table in the place of the old one."""
    before, _, rest = readme.read_text().partition("<!-- figures -->\n")
    _, _, after = rest.partition("<!-- end -->")
    readme.write_text(f"{before}<!-- figures -->\n{report}\n<!-- end -->{after}")


if __name__ == "__main__":
    main()
