"""What scheduling may never change of prompts with images, for each kind of eyes: an answer is that of the plain run in
chunks of every size, from a cached prefix that ends inside or after the image, after preemption, and beside others.

"Plain" is a request alone in an engine of its own, its prompt computed in one step. Token ids must be equal, and the
best three at each place; their log-probabilities may differ in the last bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import engines
import pytest
import seeing
import tiny_checkpoint
import vision_oracle
import vlms
from msgspec import structs
from vision_oracle import picture

from izh.bench.adapters import write_adapters
from izh.bench.shapes import SHAPES
from izh.config import EngineOptions
from izh.engine.build import Adapters, compose
from izh.engine.core import EngineCore
from izh.model.source import resolve
from izh.multimodal.gate import ImageGate
from izh.multimodal.prompt import VisionPrompt
from izh.multimodal.seam import MultimodalProcessor

BLOCK = 4
BOUND = 2e-4
BEFORE, AFTER = "the quick brown fox jumps over the lazy dog ", " what is this? hello world"
NAMES = ("red", "blue")


@dataclass(eq=False)
class Eyes:
    """A model that sees, in an engine with two adapters."""

    processor: MultimodalProcessor
    loaded: engines.Loaded
    adapters: Adapters
    min_tokens: int  # fewer make no step: an image's rows that see each other are computed in one

    def engine(self, **limits: Any) -> EngineCore:
        settings = self.loaded.settings
        num_blocks = limits.pop("num_blocks", 256)
        wanted = replace(settings.limits, block_size=BLOCK, **({"max_num_seqs": 4} | limits))
        settings = replace(settings, num_blocks=num_blocks, limits=wanted)
        return compose(settings, self.loaded.model, self.loaded.fingerprint, self.adapters)

    def prompt(self, *parts: Any) -> VisionPrompt:
        """One turn of texts and pictures."""
        messages, pictures = vision_oracle.messages([("user", list(parts))])
        prepared = self.processor.prepare(pictures)
        return self.processor.lay_out(messages, prepared).prompt(self.processor.encode(prepared))

    def plain(self, request: Any) -> Any:
        return engines.run(self.engine(prefix_caching=False), request)[request.id]

    def check_empty(self, engine: EngineCore) -> None:
        """Nothing is held any more: no block, no lease, no image."""
        engine._scheduler.check()
        assert engine.stats.kv_usage == 0.0
        assert self.adapters.gate.num_live == 0
        (images,) = (gate for gate in engine._gates if isinstance(gate, ImageGate))
        assert images.num_live == 0
        assert not engine.has_work


def contract(folder: Path) -> tuple[MultimodalProcessor, engines.Loaded]:
    tiny_checkpoint.save_llama(folder, max_position_embeddings=512)
    return seeing.path(folder), engines.load(resolve(str(folder)))


def checkpoint(make: Callable[[Path], Any]) -> Callable[[Path], tuple[MultimodalProcessor, engines.Loaded]]:
    def made(folder: Path) -> tuple[MultimodalProcessor, engines.Loaded]:
        case = make(folder)
        return case.vision, case.loaded

    return made


KINDS = {
    "contract": contract,
    "qwen2_vl": checkpoint(lambda folder: vlms.qwen("qwen2_vl", folder)),  # M-RoPE
    "qwen3_vl": checkpoint(lambda folder: vlms.qwen("qwen3_vl", folder)),  # and rows for several layers
    "gemma3": checkpoint(vlms.gemma3),  # rows that see each other both ways
}


@pytest.fixture(scope="module", params=KINDS)
def eyes(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    processor, loaded = KINDS[request.param](folder)
    adapters = Adapters.around(loaded.model, EngineOptions(max_loras=2), loaded.settings)
    home = tmp_path_factory.mktemp("adapters")
    for name, directory in zip(NAMES, write_adapters(home, loaded.model.spec, SHAPES["r16-all"], 2), strict=True):
        adapters.shelf.put(name, adapters.shelf.read(directory).result(), directory)
    return Eyes(processor, loaded, adapters, vlms.GEMMA3_ROWS if request.param == "gemma3" else 0)


def ask(name: str, prompt: VisionPrompt, adapter: str | None = None, **params: Any) -> Any:
    made = vision_oracle.request(name, prompt, logprobs=3, **({"max_tokens": 6} | params))
    return made if adapter is None else structs.replace(made, adapters=((adapter, 1.0),))


def same(output: Any, expected: Any) -> None:
    assert output.finish == expected.finish
    assert output.token_ids == expected.token_ids
    for mine, theirs in zip(output.logprobs, expected.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=BOUND)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        assert [each for _, each in mine.top] == pytest.approx([each for _, each in theirs.top], abs=BOUND)


def span(prompt: VisionPrompt) -> tuple[int, int]:
    """Where the rows of its one image start and stop."""
    return min(prompt.image_rows), max(prompt.image_rows) + 1


def test_chunks_of_every_size(eyes):
    prompt = eyes.prompt(BEFORE, picture(40, 40), AFTER)
    plain = eyes.plain(ask("a", prompt))
    for size in range(1 + eyes.min_tokens, span(prompt)[1] + 2):
        engine = eyes.engine(max_num_seqs=1, max_num_batched_tokens=size)
        same(engines.run(engine, ask("a", prompt))["a"], plain)
        eyes.check_empty(engine)


def test_a_prefix_that_ends_inside_the_image_and_after_it(eyes):
    """Whoever came before left in the middle of the image: what is cached of it is read, the rest computed."""
    prompt, other = eyes.prompt(BEFORE, picture(40, 40), AFTER), eyes.prompt(BEFORE, picture(40, 40), " and this?")
    start, stop = span(prompt)
    engine = eyes.engine(max_num_seqs=1, max_num_batched_tokens=5 + eyes.min_tokens)
    engine.add(ask("leaves", prompt))
    while not any(sequence.num_computed >= start + BLOCK for sequence in engine._scheduler.live):
        engine.step()
    engine.abort("leaves")
    engines.drain(engine)
    eyes.check_empty(engine)
    inside = engines.run(engine, ask("inside", prompt))["inside"]
    assert inside.num_cached_tokens > start
    assert inside.num_cached_tokens < stop or eyes.min_tokens, "an image that must be whole was computed to its end"
    same(inside, eyes.plain(ask("inside", prompt)))
    after = engines.run(engine, ask("after", other))["after"]
    assert after.num_cached_tokens >= stop // BLOCK * BLOCK
    same(after, eyes.plain(ask("after", other)))


def test_preempted_and_computed_again(eyes):
    prompts = {str(seed): eyes.prompt(BEFORE, picture(40, 40, seed), AFTER) for seed in range(3)}
    requests = [ask(name, prompt, max_tokens=24) for name, prompt in prompts.items()]
    longest = max(len(prompt.token_ids) for prompt in prompts.values())
    shared = span(prompts["0"])[0] // BLOCK
    # Room for all prompts, their common beginning once, and for half of one answer.
    num_blocks = 3 * (-(-longest // BLOCK) - shared) + shared + 4
    engine = eyes.engine(num_blocks=num_blocks, max_num_batched_tokens=64)
    together = engines.run(engine, *requests)
    assert engine.stats.num_preempted > 0
    eyes.check_empty(engine)
    for each in requests:
        same(together[each.id], eyes.plain(each))


@pytest.mark.parametrize("tokens", [9, 17, 512])
def test_texts_images_adapters_and_choices_in_one_batch(eyes, tokens):
    image = eyes.prompt(BEFORE, picture(40, 40), AFTER)
    two = eyes.prompt(picture(40, 40, 1), " or ", picture(56, 30), AFTER)
    text = eyes.prompt(BEFORE + AFTER)
    requests = [
        ask("image", image),
        ask("image in red", image, "red"),
        ask("text in blue", text, "blue"),
        ask("two", two),
        ask("two in blue", two, "blue"),
        ask("text", text),
        *(structs.replace(ask(f"n/{i}", two, temperature=1.0, seed=3), choice=i) for i in range(3)),
    ]
    plain = {each.id: eyes.plain(each) for each in requests}
    engine = eyes.engine(max_num_batched_tokens=tokens)
    together = engines.run(engine, *requests)
    eyes.check_empty(engine)
    for name, expected in plain.items():
        same(together[name], expected)
    firsts = {round(output.logprobs[0].top[-1][1], 3) for output in plain.values()}
    assert len(firsts) > 5, "they differ, or equality says little"


def test_whoever_leaves_at_whatever_step_leaves_nothing(eyes):
    prompt = eyes.prompt(BEFORE, picture(40, 40), AFTER)
    engine = eyes.engine(prefix_caching=False, max_num_seqs=2, max_num_batched_tokens=7 + eyes.min_tokens)
    for num_steps in range(2 + len(prompt.token_ids) // 4):
        engine.add(ask("leaves", prompt, "red"))
        for _ in range(num_steps):
            engine.step()
        engine.abort("leaves")
        engines.drain(engine)
        eyes.check_empty(engine)
    same(engines.run(engine, ask("stays", prompt))["stays"], eyes.plain(ask("stays", prompt)))


def test_other_pixels_share_the_text_before_them_and_nothing_more(eyes):
    """The token ids are the same in every case."""
    engine = eyes.engine()
    first = eyes.prompt(BEFORE, picture(40, 40), AFTER)
    turned = picture(40, 40).rotate(180)
    pixel = picture(40, 40)
    pixel.putpixel((20, 20), (255, 0, 255))
    palette = picture(40, 40).quantize(8).convert("RGB")
    others = [picture(40, 40, 1), turned, pixel, palette, picture(38, 38).resize((40, 40))]
    same(engines.run(engine, ask("first", first))["first"], eyes.plain(ask("first", first)))
    for index, other in enumerate(others):
        prompt = eyes.prompt(BEFORE, other, AFTER)
        assert prompt.token_ids == first.token_ids
        found = engines.run(engine, ask(str(index), prompt))[str(index)]
        assert found.num_cached_tokens == span(prompt)[0] // BLOCK * BLOCK
        same(found, eyes.plain(ask(str(index), prompt)))
    text = replace(first, image_rows={})
    assert engines.run(engine, ask("text", text))["text"].num_cached_tokens == span(first)[0] // BLOCK * BLOCK
    eyes.check_empty(engine)
