"""Every rotary recipe, against transformers: the frequencies alone, and inside Llama below and beyond its length."""

from dataclasses import replace

import pytest
import tiny
import torch
from harness import PagedDecoder
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from izh.errors import ModelLoadError
from izh.model.families.llama import to_spec
from izh.model.rope import Rotary
from izh.model.spec import RopeSpec

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

ORIGINAL = 32
SHORT, LONG = [1.0, 1.1, 1.3, 1.7, 2.0, 2.5], [1.5, 2.0, 4.0, 7.0, 9.0, 12.0]
BASE = {"rope_theta": 500.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
RECIPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": ORIGINAL},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn_all": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
    "yarn_attention_factor": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.3,
    },
    "longrope": {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": ORIGINAL},
    "longrope_factor": {
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": ORIGINAL,
        "factor": 4.0,
    },
}


def config_of(name):
    # Dynamic scaling sets in beyond the model's own positions; the others extend to them.
    positions = ORIGINAL if name == "dynamic" else 4 * ORIGINAL
    sizes = {**tiny.SIZES, "max_position_embeddings": positions, "num_hidden_layers": 2}
    return LlamaConfig(**sizes, rope_parameters={**BASE, "rope_type": name.split("_")[0], **RECIPES[name]})


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("length", [ORIGINAL - 10, ORIGINAL, ORIGINAL + 1, 3 * ORIGINAL])
def test_cos_and_sin_equal_the_reference_for_a_whole_prompt(name, length):
    config = config_of(name)
    positions = torch.arange(length)
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    rotary = Rotary(to_spec(config, ()).ropes[0], "cpu")
    ours = rotary.cos_sin(positions, torch.full((length,), length))
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == torch.float32
        torch.testing.assert_close(our, their[0, :, : our.shape[1]], atol=2e-6, rtol=0)


@pytest.fixture(params=RECIPES)
def recipe(request, tmp_path):
    """A function that makes a fresh reference (its frequencies remember the longest length seen), and our decoder."""
    config = config_of(request.param)
    tiny.reference_model(config).save_pretrained(tmp_path)
    return lambda: tiny.reference_model(config), tiny.load(tmp_path)


def test_prompt_logits_equal_the_reference_below_and_beyond_the_original_length(recipe):
    fresh, decoder = recipe
    for length in (ORIGINAL - 8, ORIGINAL + 30):
        tiny.check(fresh(), decoder, length)


@pytest.mark.parametrize("num_prompt", [ORIGINAL - 6, ORIGINAL + 9])
def test_decode_equals_the_reference_across_and_beyond_the_original_length(recipe, num_prompt):
    fresh, decoder = recipe
    token_ids = tiny.prompt(num_prompt + 12, seed=5)
    paged = PagedDecoder(decoder)
    row = paged.add(token_ids, num_prompt)
    paged.logits([(row, 0, num_prompt)])
    ours = torch.cat([paged.logits([(row, p, p + 1)])[0] for p in range(num_prompt, len(token_ids))])
    theirs = tiny.stepwise_logits(fresh(), token_ids, num_prompt)[num_prompt:]
    assert tiny.max_difference(ours, theirs) < 1e-4


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunked_prefill_equals_the_whole_prompt(recipe, chunk):
    _, decoder = recipe
    token_ids = tiny.prompt(ORIGINAL + 20, seed=6)
    whole = PagedDecoder(decoder).prompt_logits(token_ids)
    chunked = PagedDecoder(decoder).prompt_logits(token_ids, chunk)
    assert tiny.max_difference(chunked, whole) < 1e-4


def test_a_row_does_not_depend_on_its_neighbours_lengths():
    rotary = Rotary(to_spec(config_of("dynamic"), ()).ropes[0], "cpu")
    positions, lens = torch.tensor([5, 40, 90]), torch.tensor([20, 41, 200])
    together = rotary.cos_sin(positions, lens)
    for row in range(3):
        alone = rotary.cos_sin(positions[row : row + 1], lens[row : row + 1])
        assert all(torch.allclose(a[0], t[row], atol=1e-6) for a, t in zip(alone, together, strict=True))


def test_linear_scaling_of_half_a_head_stretches_positions():
    spec = RopeSpec(type="linear", theta=100.0, rotary_dim=6, max_position_embeddings=64, factor=2.0)
    lens = torch.full((4,), 8)
    scaled = Rotary(spec, "cpu").cos_sin(torch.arange(0, 8, 2), lens)
    plain = Rotary(replace(spec, type="default", factor=None), "cpu").cos_sin(torch.arange(4), lens)
    for one, other in zip(scaled, plain, strict=True):
        assert one.shape == (4, 3)
        torch.testing.assert_close(one, other)


def test_unknown_type_is_refused_by_name():
    with pytest.raises(ModelLoadError, match=r"'spiral'.*yarn"):
        Rotary(RopeSpec(type="spiral", theta=1.0, rotary_dim=4, max_position_embeddings=8), "cpu")


def test_length_key_tells_apart_exactly_the_prompts_whose_rows_differ():
    keys = {name: to_spec(config_of(name), ()).length_key for name in RECIPES}
    for name in ("default", "linear", "llama3", "yarn"):
        assert keys[name](5) == keys[name](10_000) == b""
    assert keys["longrope"](ORIGINAL) == b""
    assert keys["longrope"](ORIGINAL + 1) == keys["longrope"](4 * ORIGINAL) != b""
    assert keys["dynamic"](ORIGINAL) == b""
    beyond = {keys["dynamic"](length) for length in range(ORIGINAL + 1, ORIGINAL + 50)}
    assert len(beyond) == 49
    assert b"" not in beyond


def test_dynamic_scaling_lets_a_model_go_beyond_its_positions():
    assert to_spec(config_of("dynamic"), ()).max_length == 3 * ORIGINAL
    assert to_spec(config_of("yarn"), ()).max_length == 4 * ORIGINAL
