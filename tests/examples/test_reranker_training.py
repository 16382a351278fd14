"""How the demo's reranker is trained: pages are read right, held out is held out, what is taught is what is served."""

from pathlib import Path

import example_modules
import pytest
import torch

from izh.pooling.matching import HEAD_FILE, MatchHead

FOLDER = Path(__file__).parents[2] / "examples" / "reranker"
RENDERED = """TAC(1)                           User Commands                           TAC(1)

NAME
       tac, cat-backwards -- concatenate and print files
       in reverse

SYNOPSIS
       tac [OPTION]... [FILE]...

DESCRIPTION
       Write each FILE to standard output, last line first.

           $ tac one
           $ tac two

       Options:

       With no FILE, or when FILE is -, read standard input.

AUTHOR
       Written by somebody who is not named here at all.
"""


@pytest.fixture(autouse=True)
def examples_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    example_modules.make_importable(monkeypatch, FOLDER)


def test_a_page_is_its_description_and_prose() -> None:
    import corpus

    assert corpus.parse("coreutils", RENDERED) == corpus.Page(
        "coreutils",
        "tac",
        "concatenate and print files in reverse",
        "Write each FILE to standard output, last line first. With no FILE, or when FILE is -, read standard input.",
    )
    assert corpus.parse("coreutils", RENDERED.replace("DESCRIPTION", "NOTES")) is None
    assert corpus.parse("coreutils", RENDERED.replace("--", "")) is None


def test_a_question_has_one_answer_that_does_not_spell_it() -> None:
    import corpus

    good = corpus.Page("p", "a", "sort lines of text", "puts them into order")
    double = [corpus.Page("p", name, "does it twice", f"{name} does") for name in "bc"]
    copied = [corpus.Page("p", name, f"the {name}", "one passage") for name in "de"]
    spelled = corpus.Page("p", "f", "Read a file", "To read a (file), call this")
    assert corpus.usable([spelled, *double, good, *copied, good]) == [good]


def test_a_page_stays_on_its_side() -> None:
    import corpus

    made = [corpus.Page("perl-doc", f"page{i}", "q", "p") for i in range(2000)]
    share = sum(page.split == "held_out" for page in made) / len(made)
    assert abs(share - corpus.HELD_OUT_PERCENT / 100) < 0.03
    assert {page.split for page in made} == {"held_out", "train"}
    assert corpus.Page("git-man", "git-log", "q", "p").split == "unseen_packages"
    assert [corpus.Page("tcllib", name, "", "").split for name in ("aes", "json")] == ["held_out", "train"]


def test_reciprocal_ranks() -> None:
    import judge

    scores = torch.arange(22.0).view(2, 11).flip(1)
    right = torch.zeros(2, 11, dtype=torch.bool)
    right[0, 2] = True
    assert judge.reciprocal_ranks(scores, right).tolist() == [pytest.approx(1 / 3), 0]
    right[1, 10] = True
    assert judge.reciprocal_ranks(scores, right)[1] == 0


def test_the_head_that_is_trained_is_the_head_that_is_served(tmp_path: Path) -> None:
    """Padded and in a batch there, one pair after the other here."""
    import train
    from safetensors.torch import save_file

    torch.manual_seed(3)
    head = train.Head(12)
    with torch.no_grad():
        for each in (head.weigh, head.cls, head.bias):
            each.normal_()
    tensors = {"weigh": head.weigh, "cls": head.cls, "scale": head.log_scale.exp(), "bias": head.bias}
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, tmp_path / HEAD_FILE)
    served = MatchHead(tmp_path, 12)
    hidden, lens, num_query = torch.randn(3, 9, 12), (9, 6, 4), (3, 5, 1)
    mask = (torch.arange(9) < torch.tensor(lens)[:, None]).long()
    types = mask * (torch.arange(9) >= torch.tensor(num_query)[:, None])
    for row, length, query, score in zip(hidden, lens, num_query, head(hidden, mask, types), strict=True):
        torch.testing.assert_close(served(row[:length], query), score)


def test_the_bias_makes_scores_add_up_to_the_number_of_right_pairs() -> None:
    import train

    class Fixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = train.Head(4)

        def forward(self, pairs: list[tuple[str, str]]) -> torch.Tensor:
            return torch.tensor([float(len(document)) for _, document in pairs]) + self.head.bias

    scorer = Fixed()
    lists = [[("q", "x" * n) for n in (30, 26, 22)], [("q", "x" * n) for n in (31, 20, 25)]]
    train.centre(scorer, lists)
    scores = torch.cat([scorer(each) for each in lists]).sigmoid()
    assert scores.sum().item() == pytest.approx(2, abs=1e-4)
    assert scores[0] > 0.5 > scores[2]
