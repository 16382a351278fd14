"""Images through scheduler, cache and runner, against Qwen2-VL's and Qwen3-VL's own text models."""

from dataclasses import dataclass, replace
from typing import Any

import engines
import pytest
import torch
from image_cases import PLACEHOLDER, checked, features, prompt
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from izh.cache.blocks import BlockPool
from izh.cache.keys import BlockKeys
from izh.engine.core import EngineCore
from izh.model.rope import Mrope
from izh.model.source import resolve
from izh.multimodal.gate import ImageGate
from izh.multimodal.stage import ImageStage
from izh.runner.runner import Runner, allocate_pages
from izh.sampling.gate import SamplingGate
from izh.sampling.head import SamplingHead
from izh.schedule.scheduler import Scheduler

BOUND = 1e-4
SIZES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}
SECTIONS = {"qwen2": (2, 3, 3), "qwen3": (3, 3, 2)}
VISION = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, Qwen2VLTextConfig, Qwen2VLTextModel),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, Qwen3VLTextConfig, Qwen3VLTextModel),
}


@dataclass
class World:
    """A text checkpoint in our engine, and a vision-language text model around the same weights."""

    loaded: engines.Loaded
    text: Any
    vision: Any
    mrope: Mrope

    def engine(self, prompts: dict[str, Any], *, num_blocks: int = 128, **limits: Any) -> EngineCore:
        """An engine in which the request of this name has this prompt's images."""
        model, settings = self.loaded.model, self.loaded.settings
        limits_ = replace(settings.limits, **({"block_size": 4, "max_num_seqs": 8} | limits))
        found = {name: features(made, sections=self.mrope.sections) for name, made in prompts.items()}
        images = ImageGate(lambda sequence: checked(found.get(sequence.id)), model.spec.ropes, self.mrope)
        gates = (SamplingGate(model.spec.vocab_size, has_lm_head=True), images)
        heads = [SamplingHead(model.logits, model.ops, model.spec.vocab_size, frozenset(), 256)]
        keys = BlockKeys(limits_.block_size, b"model", model.spec.length_key, [gate.key for gate in gates])
        scheduler = Scheduler(limits_, BlockPool(num_blocks), keys, gates)
        pages = allocate_pages(model, num_blocks, limits_.block_size, torch.float32, torch.device("cpu"))
        stages = [ImageStage(images, model.rotary)]
        runner = Runner(model, pages, limits_.block_size, torch.device("cpu"), stages, heads)
        return EngineCore(scheduler, runner, gates, heads, 256, model.spec.vocab_size)

    @torch.inference_mode()
    def check(self, made: Any, output: Any) -> None:
        """Greedy by the reference's logits over the prompt and answer, with its log-probabilities."""
        assert output.finish.reason == "length", output.finish
        total, answer = len(made.token_ids), output.token_ids
        embeds = self.text.get_input_embeddings()(torch.tensor([made.token_ids + answer])).clone()
        for place, row in made.image_rows.items():
            embeds[0, place] = row
        following = torch.arange(total, total + len(answer)).expand(3, -1) + made.delta
        positions = torch.cat([made.positions, following], 1)[:, None]
        hidden = self.vision(inputs_embeds=embeds, position_ids=positions, use_cache=False).last_hidden_state
        logprobs = self.text.lm_head(hidden)[0, total - 1 : -1].float().log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == answer
        for position, token in enumerate(answer):
            assert output.logprobs[position].logprob == pytest.approx(logprobs[position, token].item(), abs=BOUND)


@pytest.fixture(scope="module", params=VISION)
def world(request, tmp_path_factory):
    config_class, text_class, vision_config_class, vision_class = VISION[request.param]
    sections, folder = SECTIONS[request.param], tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    text = text_class(config_class(**SIZES)).eval()
    with torch.no_grad():
        for parameter in text.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    text.save_pretrained(folder)
    rope = {"rope_type": "default", "rope_theta": text.config.rope_parameters["rope_theta"]}
    vision = vision_class(vision_config_class(**SIZES, rope_parameters=rope | {"mrope_section": list(sections)})).eval()
    vision.load_state_dict(text.model.state_dict())
    return World(engines.load(resolve(str(folder))), text, vision, Mrope(sections, request.param == "qwen3"))


LAYOUT = (5, (1, 2, 3), 4, (1, 3, 3), (1, 1, 2), 6)


def request(name, made, **params):
    return engines.request(name, made.token_ids, logprobs=0, **({"max_tokens": 8} | params))


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 16, 64])
def test_every_chunk_size_is_the_reference(world, tokens):
    made = prompt(*LAYOUT)
    engine = world.engine({"a": made}, max_num_batched_tokens=tokens, max_num_seqs=1)
    world.check(made, engines.run(engine, request("a", made))["a"])


def test_images_and_text_in_one_batch_are_each_the_reference(world):
    prompts = {
        "a": prompt(*LAYOUT),
        "b": prompt((1, 4, 4), 3, seed=1),
        "c": prompt(2, (2, 2, 2), seed=2),
    }
    text = prompt(17, seed=3)
    engine = world.engine(prompts, max_num_batched_tokens=11)
    done = engines.run(engine, *(request(name, made) for name, made in prompts.items()), request("text", text))
    for name, made in prompts.items():
        world.check(made, done[name])
    world.check(text, done["text"])


def test_a_cached_image_is_read_and_gives_the_reference(world):
    made, other = prompt(*LAYOUT), prompt(*LAYOUT)
    other.image_rows[16] = other.image_rows[16] * -2  # in the second image
    engine = world.engine({"cold": made, "warm": made, "other": other})
    engines.run(engine, request("cold", made))
    warm = engines.run(engine, request("warm", made))["warm"]
    world.check(made, warm)
    assert warm.num_cached_tokens == len(made.token_ids) // 4 * 4 - (len(made.token_ids) % 4 == 0)
    changed = engines.run(engine, request("other", other))["other"]
    world.check(other, changed)
    assert changed.num_cached_tokens == 12, "up to the block where the second image begins, at 15"


def test_the_same_tokens_without_the_image_share_only_the_text_before_it(world):
    made = prompt(*LAYOUT)
    plain = replace(made, image_rows={}, positions=torch.arange(len(made.token_ids)).expand(3, -1), delta=0)
    engine = world.engine({"image": made})
    engines.run(engine, request("image", made))
    done = engines.run(engine, request("plain", plain))["plain"]
    world.check(plain, done)
    assert done.num_cached_tokens == 4


def test_an_answer_is_found_again_as_part_of_the_next_prompt(world):
    made = prompt(*LAYOUT)
    engine = world.engine({"one": made})
    answer = engines.run(engine, request("one", made, max_tokens=14))["one"].token_ids
    ids = [*made.token_ids, *answer, 20, 21]
    following = torch.arange(len(made.token_ids), len(ids)).expand(3, -1) + made.delta
    grown = replace(made, token_ids=ids, positions=torch.cat([made.positions, following], 1))
    both = world.engine({"one": made, "two": grown})
    engines.run(both, request("one", made, max_tokens=14))
    done = engines.run(both, request("two", grown))["two"]
    world.check(grown, done)
    assert done.num_cached_tokens >= len(ids) - 2 - 4


def test_preempted_images_are_computed_again_as_the_reference(world):
    prompts = {f"r{i}": prompt(*LAYOUT, seed=i) for i in range(3)}
    engine = world.engine(prompts, num_blocks=26, max_num_batched_tokens=16)
    requests = [request(name, made, max_tokens=20) for name, made in prompts.items()]
    done = engines.run(engine, *requests)
    assert engine.stats.num_preempted > 0
    for name, made in prompts.items():
        world.check(made, done[name])


def test_what_does_not_fit_the_prompt_ends_as_that_requests_error(world):
    made, text = prompt(*LAYOUT), prompt(9, seed=4)
    engine = world.engine({"bad": made})
    shorter = engines.request("bad", [PLACEHOLDER] * 3)
    done = engines.run(engine, shorter, request("text", text))
    assert done["bad"].finish.reason == "error"
    assert done["bad"].finish.param == "features.positions"
    world.check(text, done["text"])
