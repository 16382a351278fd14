"""Every family, on tiny random checkpoints, against transformers in float32."""

import pytest
import tiny
import torch
from harness import PagedDecoder
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from izh.batch import Overrides
from izh.model.load import load_spec
from izh.model.source import resolve

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

SIZES = tiny.SIZES
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 5.0, 9.0]}
WINDOW = 8

CASES = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama_tied_biases": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama_head_dim_mha": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}, head_dim=16, rope_theta=5000.0),
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "mistral_no_window": MistralConfig(**SIZES, sliding_window=None, head_dim=20),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2_window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3_biases": Qwen3Config(**SIZES, head_dim=10, attention_bias=True, tie_word_embeddings=True),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layer_interval=2),
    "smollm3_window": SmolLM3Config(
        **SIZES, no_rope_layers=[1, 0, 0], use_sliding_window=True, sliding_window=WINDOW, tie_word_embeddings=False
    ),
    "phi3": Phi3Config(
        **SIZES,
        original_max_position_embeddings=32,
        partial_rotary_factor=0.5,
        rope_parameters={**LONGROPE, "rope_theta": 1000.0},
        sliding_window=20,
    ),
    "gemma3_text": Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=20,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "gemma3_text_softcap": Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=WINDOW, sliding_window_pattern=3, final_logit_softcapping=5.0
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(name, reference model, our decoder) loaded from what the reference saved."""
    config = CASES[request.param]
    model = tiny.reference_model(config)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory, max_shard_size="40KB" if "tied" in request.param else "1GB")
    return request.param, model, tiny.load(directory)


def test_logits_equal_the_reference_on_prompts_within_and_beyond_the_window(case):
    _, model, decoder = case
    tiny.check(model, decoder, 1, WINDOW, 45)


def test_chunks_mixed_with_another_sequence_equal_the_whole_prompt(case):
    _, model, decoder = case
    paged = PagedDecoder(decoder)
    first, second = paged.add(tiny.prompt(30, seed=1)), paged.add(tiny.prompt(13, seed=2))
    parts = [
        paged.logits([(first, 0, 7), (second, 0, 12)]),
        paged.logits([(second, 12, 13), (first, 7, 8)]),
        paged.logits([(first, 8, 30)]),
    ]
    ours_first = torch.cat([parts[0][0], parts[1][1], parts[2][0]])
    ours_second = torch.cat([parts[0][1], parts[1][0]])
    assert tiny.max_difference(ours_first, tiny.reference_logits(model, first.token_ids)) < 1e-4
    assert tiny.max_difference(ours_second, tiny.reference_logits(model, second.token_ids)) < 1e-4


def test_decode_steps_equal_the_reference_with_its_own_cache(case):
    _, model, decoder = case
    token_ids = tiny.prompt(40, seed=3)
    paged = PagedDecoder(decoder)
    row = paged.add(token_ids, num_prompt=31)
    paged.logits([(row, 0, 31)])
    ours = torch.cat([paged.logits([(row, p, p + 1)])[0] for p in range(31, 40)])
    assert tiny.max_difference(ours, tiny.stepwise_logits(model, token_ids, 31)[31:]) < 1e-4


def test_overridden_rows_replace_the_scaled_embedding(case):
    _, model, decoder = case
    token_ids = tiny.prompt(12, seed=4)
    rows, values = torch.tensor([2, 7]), torch.randn(2, decoder.spec.hidden_size)
    paged = PagedDecoder(decoder)
    ours = paged.logits([(paged.add(token_ids), 0, 12)], Overrides(rows=rows, values=values))[0]
    with torch.inference_mode():
        embeds = model.get_input_embeddings()(torch.tensor([token_ids]))
        embeds[0, rows] = values
        theirs = model(inputs_embeds=embeds, use_cache=False).logits[0]
    assert tiny.max_difference(ours, theirs) < 1e-4


def test_projections_have_the_names_that_features_replace(case):
    name, _, decoder = case
    modules = dict(decoder.named_modules())
    for layer in range(decoder.spec.num_layers):
        for module in ("attention.qkv_proj", "attention.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            assert isinstance(modules[f"layers.{layer}.{module}"], torch.nn.Linear)
    tied = modules["lm_head"].weight is modules["embed_tokens"].weight
    assert tied == CASES[name].tie_word_embeddings


def test_gemma3_inside_an_image_model_uses_its_text_part(tmp_path):
    text = CASES["gemma3_text"].to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    model = tiny.reference_model(config, Gemma3ForConditionalGeneration)
    model.save_pretrained(tmp_path)
    tiny.check(model, tiny.load(tmp_path), 30)


def test_stop_ids_come_from_generation_config_first(tmp_path):
    model = tiny.reference_model(CASES["llama"])
    model.generation_config.eos_token_id = [5, 2]
    model.save_pretrained(tmp_path)
    source = resolve(str(tmp_path))
    assert load_spec(source).eos_token_ids == (5, 2)
    (tmp_path / "generation_config.json").unlink()
    assert load_spec(source).eos_token_ids == (2,)
