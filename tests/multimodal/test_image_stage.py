"""Images in the step: what the stage writes, and that the decoder's rows do not depend on how the prompt was cut."""

import random

import image_cases
import pytest
import tiny_checkpoint
import torch
from image_cases import admit, checked, features, prompt

from izh.batch import Overrides
from izh.kernels.reference import REFERENCE
from izh.model.load import load_decoder, load_spec
from izh.model.rope import Mrope
from izh.model.source import resolve
from izh.multimodal.gate import ImageGate
from izh.multimodal.stage import ImageStage
from izh.request import Request, SamplingParams
from izh.runner.runner import Runner, allocate_pages, assemble
from izh.sequence import Chunk, Plan, Sequence

CPU, BLOCK = torch.device("cpu"), 4
LAYOUT = (3, (1, 2, 3), 2, (2, 2, 1), (1, 1, 1), 5)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    source = resolve(str(tiny_checkpoint.save_llama(tmp_path_factory.mktemp("model"))))
    loaded = load_decoder(source, load_spec(source), REFERENCE, CPU, torch.float32, quiet=True)[0]
    assert loaded.spec.hidden_size == image_cases.HIDDEN
    assert loaded.spec.head_dim == image_cases.HEAD_DIM
    return loaded


class EveryRow:
    """A head that keeps the hidden rows of the step."""

    def rows(self, plan):
        return list(range(plan.num_tokens))

    def finish(self, plan, hidden):
        self.hidden = hidden.values.clone()
        return []

    def forget(self, sequence):
        return


class World:
    """Sequences with and without images on one runner, with shuffled blocks and pages full of large numbers."""

    def __init__(self, decoder, num_blocks=64):
        self.decoder = decoder
        self.found = {}
        self.gate = ImageGate(lambda each: checked(self.found.get(each.id)), decoder.spec.ropes)
        self.stage = ImageStage(self.gate, decoder.rotary)
        self.head = EveryRow()
        pages = allocate_pages(decoder, num_blocks, BLOCK, torch.float32, CPU)
        for pair in pages:
            for page in pair:
                page.fill_(1e4)
        self.runner = Runner(decoder, pages, BLOCK, CPU, [self.stage], [self.head])
        self.free = list(range(num_blocks))
        random.Random(0).shuffle(self.free)

    def add(self, name, made, with_images=True):
        sequence = Sequence(Request(id=name, prompt_token_ids=made.token_ids, params=SamplingParams(), arrival_s=0.0))
        if with_images:
            self.found[name] = features(made)
        admit(self.gate, sequence)
        return sequence

    def run(self, *chunks):
        """Hidden rows of each (sequence, start, stop)."""
        plan = self.plan(*chunks)
        self.runner.run(plan)
        return self.head.hidden.split([chunk.count for chunk in plan.chunks])

    def plan(self, *chunks):
        for sequence, _, stop in chunks:
            while len(sequence.blocks) * BLOCK < stop:
                sequence.blocks.append(self.free.pop())
        return Plan([Chunk(sequence, start, stop - start) for sequence, start, stop in chunks])

    def batch(self, *chunks):
        """The batch that the stage makes of these chunks."""
        plan = self.plan(*chunks)
        batch = assemble(plan.chunks, BLOCK, CPU)
        self.stage.sync(plan)
        self.stage.fill(plan, batch)
        return batch


@pytest.fixture
def world(decoder):
    return World(decoder)


def whole(decoder, made):
    """The prompt in one batch, its rows and positions put in by hand."""
    world = World(decoder)
    sequence = world.add("whole", made, with_images=False)
    batch = assemble(world.plan((sequence, 0, len(made.token_ids))).chunks, BLOCK, CPU)
    batch.positions = made.positions
    batch.overrides = Overrides(torch.tensor(list(made.image_rows)), torch.stack(list(made.image_rows.values())))
    pages = allocate_pages(decoder, 64, BLOCK, torch.float32, CPU)
    for rotary in decoder.rotary:
        rotary.set_mrope(Mrope(image_cases.SECTIONS))
    with torch.inference_mode():
        return decoder(batch, pages)


def close(ours, theirs):
    assert theirs.std() > 0.1
    return (ours - theirs).abs().max() < 1e-4


def test_every_cut_into_two_chunks_gives_the_whole(decoder):
    made = prompt(*LAYOUT)
    world = World(decoder)
    sequence = world.add("warm", made)
    total = sequence.num_tokens
    assert total == 21
    (all_at_once,) = world.run((sequence, 0, total))
    expected = whole(decoder, made)
    assert close(all_at_once, expected)
    for cut in range(1, total):
        other = World(decoder)
        sequence = other.add("cut", made)
        rows = torch.cat([*other.run((sequence, 0, cut)), *other.run((sequence, cut, total))])
        assert close(rows, expected), cut


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_every_chunk_size_gives_the_whole(decoder, world, size):
    made = prompt(*LAYOUT)
    sequence, total = world.add("r", made), len(made.token_ids)
    rows = [*(world.run((sequence, i, min(i + size, total)))[0] for i in range(0, total, size))]
    assert close(torch.cat(rows), whole(decoder, made))


def test_rows_and_positions_both_matter(decoder):
    """Or the equalities above would say nothing."""
    made = prompt(*LAYOUT)
    expected = whole(decoder, made)
    for changed in ({"positions": torch.arange(21).expand(3, -1)}, {"image_rows": {3: torch.zeros(64)}}):
        other = prompt(*LAYOUT)
        for name, value in changed.items():
            object.__setattr__(other, name, value)
        assert not torch.allclose(whole(decoder, other)[-1], expected[-1], atol=1e-2)


def test_a_mixed_batch_gives_each_its_own(decoder, world):
    one, two, text = prompt(*LAYOUT), prompt((1, 3, 3), 4, seed=5), prompt(15, seed=9)
    sequences = [world.add("one", one), world.add("text", text, with_images=False), world.add("two", two)]
    world.run((sequences[0], 0, 5), (sequences[1], 0, 7), (sequences[2], 0, 2))
    rows = world.run((sequences[2], 2, 13), (sequences[0], 5, 20), (sequences[1], 7, 15))
    assert close(rows[0], whole(decoder, two)[2:])
    assert close(rows[1], whole(decoder, one)[5:20])
    alone = World(decoder)
    (expected,) = alone.run((alone.add("text", text, with_images=False), 0, 15))
    assert close(rows[2], expected[7:])


def test_text_beside_an_image_has_the_very_numbers_it_has_alone(decoder, world):
    """Its positions come on three equal axes then, which must give the bits that one axis gives."""
    text = prompt(6, seed=3)
    alone = world.batch((world.add("a", text, with_images=False), 0, 6))
    beside = world.batch((world.add("i", prompt(*LAYOUT)), 0, 21), (world.add("b", text, with_images=False), 0, 6))
    assert alone.positions.shape == (1, 6)
    assert beside.positions.shape == (3, 27)
    for rotary in decoder.rotary:
        one = rotary.cos_sin(alone.positions[0], alone.rope_lens)
        three = rotary.cos_sin(beside.positions, beside.rope_lens)
        assert all(torch.equal(a, b[21:]) for a, b in zip(one, three, strict=True))


def test_a_step_without_images_is_left_as_it_is(world):
    text, image = world.add("t", prompt(9), with_images=False), world.add("i", prompt(*LAYOUT))
    batch = world.batch((text, 2, 9))
    assert batch.positions.tolist() == [list(range(2, 9))]
    assert batch.overrides is None
    before = world.batch((image, 0, 3))
    assert before.positions.tolist() == [[0, 1, 2]]
    assert before.overrides is None


def test_the_batch_holds_what_lies_in_the_chunk(world):
    made = prompt(*LAYOUT)
    text, image = world.add("t", prompt(9), with_images=False), world.add("i", made)
    batch = world.batch((text, 0, 4), (image, 7, 13))
    assert batch.positions.tolist() == torch.cat([torch.arange(4).expand(3, -1), made.positions[:, 7:13]], 1).tolist()
    assert batch.overrides.rows.tolist() == [4, 5, 8, 9]
    assert torch.equal(batch.overrides.values, torch.stack([made.image_rows[place] for place in (7, 8, 11, 12)]))
    assert batch.context_lens.tolist() == [4, 13], "physical order"


def test_decode_after_an_image_goes_on_from_delta_on_one_axis(decoder, world):
    made = prompt(*LAYOUT)
    sequence = world.add("r", made)
    total = sequence.num_tokens
    world.run((sequence, 0, total))
    sequence.token_ids += [31, 32, 33]
    rows = [world.run((sequence, total + i, total + i + 1))[0] for i in range(3)]
    batch = world.batch((sequence, total + 1, total + 2))
    assert batch.positions.tolist() == [[total + 1 + made.delta]]
    assert batch.overrides is None
    grown = prompt(*LAYOUT)
    following = torch.arange(total, total + 3).expand(3, -1) + made.delta
    object.__setattr__(grown, "token_ids", [*made.token_ids, 31, 32, 33])
    object.__setattr__(grown, "positions", torch.cat([made.positions, following], 1))
    assert close(torch.cat(rows), whole(decoder, grown)[total:])


def test_computing_again_from_any_point_gives_the_same(decoder, world):
    """After preemption: new blocks, some generated tokens, from the start or from a cached prefix inside an image."""
    made = prompt(*LAYOUT)
    sequence = world.add("r", made)
    total = sequence.num_tokens
    world.run((sequence, 0, total))
    sequence.token_ids += [31, 32]
    before = torch.cat([world.run((sequence, total + i, total + i + 1))[0] for i in range(2)])
    kept = sequence.blocks[:2]  # positions 0..7, the image is 3..8
    for start, blocks in ((0, []), (8, kept)):
        sequence.blocks = list(blocks)
        sequence.num_cached = start
        (rows,) = world.run((sequence, start, total + 2))
        assert close(rows[:-2], whole(decoder, made)[start:])
        assert close(rows[-2:], before)
