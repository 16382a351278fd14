"""`izh bench images` on a tiny model that sees: what is counted and shown, and what is refused."""

import io
import json

import clocked
import pytest
import tiny_checkpoint
from PIL import Image

from izh.bench.images import Seen, check, figures_of, report, table
from izh.bench.options import ImagesOptions
from izh.bench.seeing import SeeingShape, photograph
from izh.config import EngineOptions
from izh.errors import OptionError

TINY = SeeingShape(
    tower_layers=1,
    tower_width=32,
    tower_heads=2,
    patch_size=4,
    side=32,
    layers=2,
    width=64,
    heads=4,
    kv_heads=2,
    intermediate=96,
)
NUM_ROWS = 12  # of an image that is 4 to 3 and fits into 32 x 32: 4 x 3 squares of 8 pixels


def test_the_whole_run_compares_new_and_known_images_with_the_peer(tmp_path, capsys):
    options = ImagesOptions(batch=(1, 2), width=80, height=60, repeats=2, json=str(tmp_path / "figures.json"))
    assert report(EngineOptions(kv_cache_gb=0.05, num_threads=1), options, TINY) == 0
    printed = capsys.readouterr().out
    assert "random Qwen2-VL" in printed
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [(each["engine"], each["batch"]) for each in written["figures"]] == [
        ("izh", 1),
        ("transformers", 1),
        ("izh", 2),
        ("transformers", 2),
    ]
    ours = [each for each in written["figures"] if each["engine"] == "izh"]
    assert [each["hits"] for each in ours] == [1.0, 1.0]
    assert [each["same_tokens"] for each in ours] == [1.0, 1.0]
    row_bytes = NUM_ROWS * TINY.width * 4
    assert [each["cache_bytes"] for each in ours] == [3 * row_bytes, 7 * row_bytes]  # one was for warming up
    assert all(each["again_s"] > 0 for each in ours)


def counted(hits, num_bytes):
    return {"mm_cache_hits_total": hits, "mm_cache_bytes": num_bytes}


def test_figures_are_medians_and_shares():
    ours = Seen([2.0, 4.0, 3.0], [0.1, 0.3, 0.2], [b"a", b"b", b"c"])
    theirs = Seen([4.0, 4.0, 5.0], [], [b"a", b"b", b"x"])
    made = figures_of(1, ours, theirs, counted(5, 0), counted(7, 2**20))
    assert [(each.first_s, each.again_s) for each in made] == [(3.0, 0.2), (4.0, None)]
    assert made[0].spread == pytest.approx(2.0)
    assert made[0].hits == made[0].same_tokens == pytest.approx(2 / 3)
    (alone,) = figures_of(1, ours, Seen([], [], []), counted(5, 0), counted(8, 2**20))
    assert alone.same_tokens is None
    document = {
        "model": "vlm",
        "dtype": "fp32",
        "machine": {"processor": "cpu", "threads": 2, "torch": "2"},
        "options": {"width": 8, "height": 6, "repeats": 3},
        "date": "today",
    }
    cells, _ = clocked.shown(table(made, document))
    assert cells == [
        ["1", "izh*", "3000 ms", "200 ms", "6.7%", "67%", "1.0", "67%"],
        ["", "transformers*", "4000 ms", "", "", "", "", ""],
    ]


@pytest.mark.parametrize("field", ["batch", "width", "height", "repeats"])
def test_impossible_options_are_refused(field):
    with pytest.raises(OptionError, match=f"--{field} must be at least 1, got 0"):
        check(EngineOptions(), ImagesOptions(**{field: (0,) if field == "batch" else 0}))


def test_a_batch_that_would_not_run_at_once_and_a_model_without_eyes_are_refused(tmp_path):
    with pytest.raises(OptionError, match="--batch 4 exceeds --max-num-seqs 2"):
        check(EngineOptions(max_num_seqs=2), ImagesOptions())
    folder = tiny_checkpoint.save_llama(tmp_path / "tiny")
    with pytest.raises(OptionError, match="takes no images"):
        report(EngineOptions(model=str(folder)), ImagesOptions())


def test_a_photograph_is_a_jpeg_of_its_seeds_own():
    first, again, other = photograph(1, 64, 48), photograph(1, 64, 48), photograph(2, 64, 48)
    assert first == again != other
    with Image.open(io.BytesIO(first)) as image:
        assert (image.format, image.size) == ("JPEG", (64, 48))
