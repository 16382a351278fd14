"""What a prompt's blocks are called, and which requests are admitted."""

from concurrent.futures import Future

import pytest
import torch
from image_cases import HEAD_DIM, SECTIONS, admit, checked, features, prompt

from izh.cache.keys import BlockKeys
from izh.errors import RequestError
from izh.model.rope import Mrope
from izh.model.spec import RopeSpec
from izh.multimodal.gate import ImageGate
from izh.multimodal.prompt import VisionPrompt
from izh.request import Request, SamplingParams
from izh.sequence import Chunk, Sequence

BLOCK = 4
ROPE = RopeSpec(type="default", theta=1e4, rotary_dim=HEAD_DIM, max_position_embeddings=64)


def sequence(made, generated=0, name="r"):
    made_sequence = Sequence(Request(id=name, prompt_token_ids=made.token_ids, params=SamplingParams(), arrival_s=0.0))
    made_sequence.token_ids += [50 + i for i in range(generated)]
    return made_sequence


def keys(made, generated=0, gate_features=...):
    """The keys of the full blocks of a prompt and some generated tokens."""
    found = features(made) if gate_features is ... else gate_features
    gate = ImageGate(lambda _: checked(found), (ROPE,))
    opened = sequence(made)
    admit(gate, opened)
    opened.token_ids += [50 + i for i in range(generated)]
    BlockKeys(BLOCK, b"model", lambda length: b"", [gate.key]).extend(opened)
    return opened.keys


def num_shared(one, other):
    """How many first blocks have equal keys; after the first different one none may be equal."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    count = same.index(False) if False in same else len(same)
    assert not any(same[count:])
    return count


def test_text_before_the_first_image_is_shared_with_plain_text_and_nothing_after_is():
    made = prompt(9, (1, 2, 3), 12)
    assert num_shared(keys(made), keys(made, gate_features=None)) == 2
    assert num_shared(keys(prompt(8, (1, 2, 3), 12)), keys(prompt(8, (1, 2, 3), 12), gate_features=None)) == 2
    assert num_shared(keys(prompt(3, (1, 2, 3), 12)), keys(prompt(3, (1, 2, 3), 12), gate_features=None)) == 0


def test_a_prompt_without_images_is_plain_text():
    made = prompt(20)
    assert keys(made, 5) == keys(made, 5, gate_features=None)


def test_equal_images_share_everything_and_another_value_nothing_from_its_first_block_on():
    made, same = prompt(5, (1, 2, 3), 20), prompt(5, (1, 2, 3), 20)
    assert keys(made) == keys(same)
    same.image_rows[10][0] += 1e-6  # the image's last row lies in block 2; its first row, and so its name, in block 1
    assert num_shared(keys(made), keys(same)) == 1


def test_the_order_and_place_of_images_matter():
    one, two = prompt(2, (1, 2, 2), 2, (1, 2, 2), 10), prompt(2, (1, 2, 2), 2, (1, 2, 2), 10)
    first = [two.image_rows[place] for place in range(2, 6)]
    second = [two.image_rows[place] for place in range(8, 12)]
    two.image_rows.update(enumerate(second, 2))
    two.image_rows.update(enumerate(first, 8))
    assert one.token_ids == two.token_ids
    assert num_shared(keys(one), keys(two)) == 0


def test_an_image_that_comes_later_leaves_earlier_blocks_shared():
    """Though it changes the prompt's delta: a conversation goes on with a second image."""
    first_turn = prompt(3, (1, 2, 3), 11)
    second_turn = prompt(3, (1, 2, 3), 11, (1, 3, 3), 6)
    assert num_shared(keys(first_turn), keys(second_turn)) == len(keys(first_turn)) == 5


def test_side_by_side_only_the_image_that_differs_is_another():
    one, two = prompt(4, (1, 2, 2), (1, 2, 2), 8), prompt(4, (1, 2, 2), (1, 2, 2), 8)
    two.image_rows[11] = two.image_rows[11] * 2
    assert num_shared(keys(one), keys(two)) == 2


def test_the_same_rows_in_another_grid_are_another_image_and_other_positions_after_it():
    tall, wide = prompt(4, (1, 6, 1), 10), prompt(4, (1, 2, 3), 10)
    wide.image_rows.update(tall.image_rows)
    assert tall.token_ids == wide.token_ids
    assert num_shared(keys(tall), keys(wide)) == 1
    square, line = prompt(4, (1, 2, 2), 10), prompt(4, (1, 1, 4), 10)
    line.image_rows.update(square.image_rows)
    assert num_shared(keys(square), keys(line)) == 1


def test_sections_are_part_of_an_images_name():
    made = prompt(4, (1, 2, 3), 10)
    assert num_shared(keys(made), keys(made, gate_features=features(made, sections=(4, 2, 2)))) == 1


def test_generated_tokens_get_keys_of_their_own_positions():
    made = prompt(4, (1, 2, 3), 2)
    longer = keys(made, generated=20)
    assert len(longer) == 8
    assert num_shared(longer, keys(made, generated=20, gate_features=None)) == 1
    # What was generated may be part of the next prompt: the same tokens at the same positions, as prompt.
    ids = [*made.token_ids, *range(50, 70)]
    positions = torch.cat([made.positions, torch.arange(12, 32).expand(3, -1) + made.delta], 1)
    grown = VisionPrompt(ids, made.image_rows, positions, made.delta, made.sections)
    assert keys(grown) == longer


def parts(made, start, stop):
    gate = ImageGate(lambda _: checked(features(made)), (ROPE,))
    opened = sequence(made)
    admit(gate, opened)
    return gate.key(opened, start, stop)


def test_the_parts_of_a_key_are_image_offset_and_displacement():
    made = prompt(5, (1, 2, 3), 2, (1, 1, 2), 9)  # images at 5..10 and 13..14
    first, second = (span.digest for span in features(made).spans)
    assert parts(made, 0, 4) == ()
    assert parts(made, 4, 8)[:3] == (b"image", first, b"1")
    assert parts(made, 8, 12)[:3] == (b"image", first, b"-3")
    assert parts(made, 10, 14)[:6] == (b"image", first, b"-5", b"image", second, b"3")
    assert [tag for tag in parts(made, 16, 20) if tag == b"image"] == []
    assert parts(made, 16, 20)[0] == b"positions"


def test_text_after_an_image_that_displaces_nothing_needs_no_part():
    made = prompt(4, (1, 1, 4), 8)
    assert parts(made, 8, 12) == ()
    assert num_shared(keys(made), keys(made, gate_features=None)) == 1


def test_it_lets_every_chunk_run_and_forgets_what_ended():
    made = prompt(4, (1, 2, 2), 2)
    gate = ImageGate(lambda each: checked(features(made) if each.id == "image" else None), (ROPE,))
    image, text = sequence(made, name="image"), sequence(made, name="text")
    for each in (image, text):
        admit(gate, each)
        gate.turn()
        chunk = Chunk(each, 0, 7)
        assert gate.grant(chunk) == 7
        gate.take(chunk)
    assert gate.features(image) is not None
    assert gate.features(text) is None
    assert gate.num_live == 1
    gate.close(text)
    assert gate.num_live == 1
    gate.close(image)
    assert gate.num_live == 0
    assert gate.key(image, 4, 8) == ()


def test_it_waits_for_features_that_are_being_checked_and_forgets_those_that_leave_first():
    made = prompt(4, (1, 2, 2), 2)
    checking = {name: Future() for name in ("stays", "leaves", "wrong")}
    gate = ImageGate(lambda each: checking[each.id], (ROPE,))
    waiting = {name: sequence(made, name=name) for name in checking}
    assert {name: gate.prepare(each) for name, each in waiting.items()} == checking
    gate.close(waiting["leaves"])
    checking["stays"].set_result(features(made))
    checking["leaves"].set_result(features(made))
    checking["wrong"].set_exception(RequestError("no rows", "features.image_rows"))
    gate.open(waiting["stays"])
    with pytest.raises(RequestError, match="no rows"):
        gate.open(waiting["wrong"])
    gate.close(waiting["wrong"])
    assert gate.num_live == 1
    gate.close(waiting["stays"])
    assert gate.num_live == len(gate._checking) == 0


def open_with(made, ropes=(ROPE,), mrope=None, of=None, gate=None):
    gate = gate or ImageGate(lambda _: checked(features(made)), ropes, mrope)
    admit(gate, sequence(of or made))
    return gate


def refused(param, *args, **options):
    with pytest.raises(RequestError) as caught:
        open_with(*args, **options)
    assert caught.value.param == param
    return caught.value.message


def test_an_image_that_must_be_whole_is_granted_whole_or_not_at_all():
    made = prompt(3, (1, 2, 2), 2)  # the image at 3..6
    one = sequence(made)
    gate = ImageGate(lambda each: checked(features(made)), (ROPE,), max_whole=4)
    admit(gate, one)
    granted = {(start, count): gate.grant(Chunk(one, start, count)) for start in (0, 3, 5) for count in range(1, 5)}
    assert [granted[0, count] for count in range(1, 5)] == [1, 2, 3, 3], "up to the image"
    assert [granted[3, count] for count in range(1, 5)] == [0, 0, 0, 4]
    assert [granted[5, count] for count in range(1, 5)] == [0, 2, 3, 4], "what a cached prefix left of it"
    with pytest.raises(RequestError, match="has 4 rows side by side") as caught:
        admit(ImageGate(lambda each: checked(features(made)), (ROPE,), max_whole=3), one)
    assert caught.value.param == "features.image_rows"


def test_features_of_another_prompt_are_refused():
    made = prompt(4, (1, 2, 2), 2)
    message = refused("features.positions", made, of=prompt(4, (1, 2, 2), 3))
    assert "for 10 tokens, the prompt has 11" in message


def test_the_first_request_settles_the_sections_and_others_are_refused():
    found = {"a": features(prompt(1, (1, 2, 2)), sections=(4, 2, 2)), "b": features(prompt(1, (1, 2, 2)))}
    gate = ImageGate(lambda each: checked(found[each.id]), (ROPE,))
    assert gate.mrope is None
    admit(gate, sequence(prompt(1, (1, 2, 2)), name="a"))
    assert gate.mrope == Mrope((4, 2, 2))
    with pytest.raises(RequestError, match=r"sections are \(2, 3, 3\); this model's are \(4, 2, 2\)"):
        admit(gate, sequence(prompt(1, (1, 2, 2)), name="b"))
    assert gate.num_live == 1
    admit(gate, sequence(prompt(1, (1, 2, 2)), name="a"))


def test_without_sections_nothing_is_settled_and_a_model_that_has_some_refuses():
    made = prompt(3, (1, 1, 2))
    positions = torch.arange(len(made.token_ids)).expand(3, -1)
    plain = features(made, sections=None, positions=positions, delta=0)
    scaled = RopeSpec(type="linear", theta=100.0, rotary_dim=HEAD_DIM, max_position_embeddings=64, factor=2.0)
    gate = ImageGate(lambda each: checked(plain), (scaled,))
    admit(gate, sequence(made))
    assert gate.mrope is None
    assert gate.features(sequence(made)) is plain
    with pytest.raises(RequestError, match="sections are None") as caught:
        admit(ImageGate(lambda each: checked(plain), (ROPE,), Mrope(SECTIONS)), sequence(made))
    assert caught.value.param == "features.sections"


def test_a_models_own_sections_are_kept():
    made = prompt(1, (1, 2, 2))
    own = Mrope(SECTIONS, interleaved=True)
    assert open_with(made, mrope=own).mrope == own
    assert "this model's are (4, 2, 2)" in refused("features.sections", made, mrope=Mrope((4, 2, 2)))


def test_scaled_frequencies_are_refused_unless_the_checkpoint_combines_them():
    made = prompt(1, (1, 2, 2))
    scaled = RopeSpec(type="yarn", theta=1e4, rotary_dim=HEAD_DIM, max_position_embeddings=64, factor=4.0)
    assert "scales its rotary frequencies (yarn)" in refused("features.sections", made, ropes=(ROPE, scaled))
    open_with(made, ropes=(ROPE, scaled), mrope=Mrope(SECTIONS))


def test_sections_must_fill_every_recipe():
    narrow = RopeSpec(type="default", theta=1e4, rotary_dim=8, max_position_embeddings=64)
    assert "with the sum 4" in refused("features.sections", prompt(1, (1, 2, 2)), ropes=(ROPE, narrow))
