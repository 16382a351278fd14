"""Train the demo model's eyes, judge them on what they never saw, and write the figures into the README.

From a checkout, after `pip install -e '.[test]'`, on two CPU cores:

    python examples/vision/train.py

Writes izh/demo_vision/, which the package carries. `--out DIR` writes DIR instead, and leaves the README alone.
`--work DIR` keeps what each stage made there, and does not repeat a stage whose result is there already.
Owns: the order of the stages. Must not know: how any of them works.
"""

import argparse
import multiprocessing
import random
import tempfile
from pathlib import Path

import torch
from judge import judge
from rows import SECTIONS, Rows
from scenes import any_shapes, held_out_digits, picture_of_digit, picture_of_shapes
from tower import CONFIG, LOOK, TELL, Seer, train
from wish import wish

from izh.model.demo import demo_directory, demo_vision
from izh.multimodal import VisionPath
from izh.text.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
PLACEHOLDER = "<empty_output>"  # a token that no conversation needs
FIRST_LINE, LAST_LINE = "<!-- figures -->", "<!-- end of figures -->"


def look(work: Path) -> None:
    """Stage 1, in a process of its own beside stage 2: the tower."""
    if not (work / "tower.pt").is_file():
        torch.set_num_threads(1)
        torch.manual_seed(1)
        torch.save(train(Seer(), LOOK, None, "tower").state_dict(), work / "tower.pt")


def ask_for_rows(work: Path) -> None:
    """Stage 2: the rows that the language model would like to see."""
    if not (work / "rows.pt").is_file():
        torch.set_num_threads(1)
        torch.save(wish(demo_directory()).state_dict(), work / "rows.pt")


def tell(work: Path) -> Seer:
    """Stage 3: the tower, and its projector, learn to make these rows."""
    seer, rows = Seer(), Rows(CONFIG.output_width)
    rows.load_state_dict(torch.load(work / "rows.pt"))
    seer.load_state_dict(torch.load(work / "tower.pt"))
    torch.manual_seed(2)
    return train(seer, TELL, rows, "rows from pixels")


def save(seer: Seer, directory: Path) -> None:
    """The directory of a VisionPath, weights in float16, and two held-out pictures to show."""
    tokenizer = Tokenizer.load(demo_directory())
    (placeholder,) = tokenizer.encode(PLACEHOLDER, add_special_tokens=False)
    VisionPath(tokenizer, seer.encoder.half(), placeholder, SECTIONS).save(directory)
    (directory / "model.safetensors").chmod(0o644)
    draw = random.Random(7)
    picture_of_digit(*held_out_digits()[0], draw, 8).image.save(directory / "digit.png")
    scene = next(scene for scene in iter(lambda: any_shapes(draw), None) if scene.place)
    picture_of_shapes(scene, draw, 64).image.save(directory / "shapes.png")


def main() -> None:
    """Train, save, judge, report."""
    parser = argparse.ArgumentParser(description="Train the demo model's eyes.")
    parser.add_argument("--out", type=Path, help="write here; default: izh/demo_vision, and the README")
    parser.add_argument("--work", type=Path, help="keep what the stages made here; default: nowhere")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = words.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        beside = multiprocessing.get_context("spawn").Process(target=look, args=(work,))
        beside.start()
        ask_for_rows(work)
        beside.join()
        seer = tell(work)
    directory = words.out or demo_vision()
    save(seer, directory)
    lines = judge(directory)
    print("\n".join(lines))
    if words.out is None:
        put(HERE / "README.md", lines)


def put(readme: Path, lines: list[str]) -> None:
    """Write the lines in the place of the old ones."""
    text = readme.read_text()
    head, _, rest = text.partition(FIRST_LINE)
    _, _, tail = rest.partition(LAST_LINE)
    table = ["| asked about | in a wording of the training | in a new wording |", "|---|---|---|", *lines]
    readme.write_text("\n".join([head + FIRST_LINE, *table, LAST_LINE + tail]))


if __name__ == "__main__":
    main()
