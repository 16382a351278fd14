"""How the demo's eyes are trained: held out is held out, and packed conversations teach what each alone would."""

import random
from pathlib import Path

import example_modules
import numpy as np
import pytest
import tiny_checkpoint
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from izh.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "vision"


@pytest.fixture(autouse=True)
def examples_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    example_modules.make_importable(monkeypatch, FOLDER)


def test_no_held_out_digit_is_learned_from() -> None:
    import scenes

    taught, held_out = scenes.training_digits(), scenes.held_out_digits()
    assert (len(taught), len(held_out)) == (1500, 297)
    assert not {ink.tobytes() for ink, _ in taught} & {ink.tobytes() for ink, _ in held_out}


def test_no_held_out_wording_is_taught() -> None:
    import questions

    for about, wordings in questions.HELD_OUT.items():
        assert set(wordings).isdisjoint(questions.ASKED[about])
        assert len(set(questions.ASKED[about])) == len(questions.ASKED[about])


def test_pictures_show_what_their_scenes_say() -> None:
    """As many separate patches of ink as there are shapes, in their place, in every size."""
    import scenes

    draw = random.Random(3)
    for size in (32, 64, 200):
        for place, (x, y) in scenes.PLACES.items():
            scene = scenes.Scene(colour="blue", shape="square", count=1, place=place)
            pixels = np.asarray(scenes.picture_of_shapes(scene, draw, size).image, np.float32)
            assert pixels.shape == (size, size, 3)
            ys, xs = np.nonzero(np.abs(pixels - pixels[0, 0]).sum(2) > 100)
            assert abs(xs.mean() / size - x) < 0.08
            assert abs(ys.mean() / size - y) < 0.08
    for ink, digit in scenes.held_out_digits()[:3]:
        for size in (8, 9, 300):
            picture = scenes.picture_of_digit(ink, digit, draw, size)
            assert picture.image.size == (size, size)
            assert picture.scene.digit == digit
            assert np.asarray(picture.image).std() > 25


def test_rows_begin_as_words() -> None:
    import rows
    import scenes

    made = rows.Rows(4)
    words = " ".join(rows.FIRST_WORDS.values())
    ids: dict[str, int] = {}
    embeddings = torch.randn(200, 4)
    made.begin_as_words(lambda text: [ids.setdefault(text, len(ids))], embeddings)
    (digit, shapes) = made([scenes.Scene(digit=7), scenes.Scene(colour="red", shape="star", count=2)]).detach()
    assert torch.equal(digit[5], embeddings[ids["7"]])
    assert torch.equal(digit[6], embeddings[ids[" seven"]])
    assert torch.equal(shapes[4], embeddings[ids[" red"]])
    assert torch.equal(shapes[14], embeddings[ids[" around"]])
    assert "<digit>" in words


def test_every_wording_and_value_is_taught_as_often_as_the_others() -> None:
    import questions
    import wish

    draw, digit = wish.Evenly(1), wish.Scene(digit=3)
    asked = [questions.ask(digit, "digit", questions.ASKED, draw).question for _ in range(28)]
    assert {asked.count(each) for each in questions.ASKED["digit"]} == {2}
    scenes = [wish.any_shapes(draw) for _ in range(120)]
    assert {sum(scene.colour == colour for scene in scenes) for colour in {scene.colour for scene in scenes}} == {15}
    assert {sum(scene.count == count for scene in scenes) for count in (2, 3, 4)} == {20}
    assert asked[:14] != asked[14:]


def test_packed_conversations_have_the_loss_of_each_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wish

    monkeypatch.setattr(wish, "SECTIONS", (2, 3, 3))
    tiny_checkpoint.save_llama(tmp_path, max_position_embeddings=1024)
    tokenizer = Tokenizer.load(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).requires_grad_(False)
    scenes, draw = [wish.Scene(digit=3), wish.any_shapes(random.Random(1))], random.Random(4)
    talks = [wish.talk(tokenizer, draw, index % 2, scenes[index % 2], "Be brief.") for index in range(8)]
    rows = wish.Rows(64)
    with torch.no_grad():
        for table in rows.tables.values():
            table.normal_()
    packed = wish.pack(talks)
    loss = wish.loss_of(model, packed, rows([scenes[index] for index in packed.images]))
    total, num_tokens, num_alone = torch.zeros(()), 0, 0
    for talk in talks:
        alone = wish.pack([talk])
        length = len(talk.answers)
        total = total + wish.loss_of(model, alone, rows([scenes[talk.scene]])) * length
        num_tokens += length
        num_alone += len(alone.token_ids)
    assert len(packed.token_ids) < 0.7 * num_alone
    torch.testing.assert_close(loss, total / num_tokens, rtol=1e-4, atol=1e-5)


def test_a_conversation_alone_is_what_the_engine_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, rows and rotary positions of a pack are those of `expand_images`."""
    import wish

    from izh.multimodal import expand_images

    tiny_checkpoint.save_llama(tmp_path)
    talk = wish.talk(Tokenizer.load(tmp_path), random.Random(4), 0, wish.Scene(digit=3), None)
    packed = wish.pack([talk])
    rows = torch.randn(wish.NUM_ROWS, 8)
    expanded = expand_images(talk.ids, wish.IMAGE, [rows], [(1, wish.SIDE, wish.SIDE)], wish.SECTIONS)
    assert torch.equal(packed.positions, expanded.positions)
    assert packed.rows.tolist() == sorted(expanded.image_rows)
    assert torch.equal(packed.mask[0, 0], torch.ones_like(packed.mask[0, 0]).tril())
    assert [talk.ids[place] for place in talk.answers] == packed.answers.tolist()


def test_an_encoder_learns_the_rows() -> None:
    """A few steps take it closer: the loss is that of rows and facts together."""
    import tower

    torch.manual_seed(0)
    rows = tower.Rows(tower.CONFIG.output_width)
    with torch.no_grad():
        for table in rows.tables.values():
            table.normal_()
    seer = tower.Seer()
    shown = tower.pictures(random.Random(2), 12)
    with torch.no_grad():
        made, logits = seer(tower.pixels_of(shown))
    assert made.shape == (12, 16, 576)
    before = tower.loss_of(logits, shown)
    schedule = tower.Schedule(steps=12, learning_rate=1e-3, telling=1.0)
    taught = tower.train(seer, schedule, rows, "test")
    with torch.no_grad():
        again, logits = taught(tower.pixels_of(shown))
    wanted = rows([picture.scene for picture in shown])
    assert (again - wanted).square().mean() < (made - wanted).square().mean()
    assert tower.loss_of(logits, shown) < before
    assert cross_entropy(logits["kind"], torch.tensor([tower.facts_of(each.scene)["kind"] for each in shown])) < 1
