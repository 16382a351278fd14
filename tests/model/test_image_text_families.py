"""Language models inside image-text models: what their configs become, and what is refused by name."""

import pytest
import tiny
from transformers import LlavaConfig, Qwen2VLConfig, Qwen3VLConfig

from izh.errors import ModelLoadError
from izh.model.families import family_of

TEXT = tiny.SIZES
ROPE = {"rope_type": "default", "rope_theta": 1000.0}
VISION_3 = {"depth": 2, "hidden_size": 16, "num_heads": 2, "deepstack_visual_indexes": [0, 1]}


def spec_of(config):
    return family_of(config.model_type).to_spec(config, (2,))


def qwen2_vl(**rope):
    return Qwen2VLConfig(text_config=TEXT | {"rope_parameters": ROPE | rope}, tie_word_embeddings=True)


def qwen3_vl(num_layers=3, **rope):
    text = TEXT | {"head_dim": 12, "rope_parameters": ROPE | rope, "num_hidden_layers": num_layers}
    return Qwen3VLConfig(text_config=text, vision_config=VISION_3)


def test_sections_and_their_layout_are_the_checkpoints():
    spec = spec_of(qwen2_vl(mrope_section=[1, 2, 3]))
    assert (spec.ropes[0].mrope_sections, spec.ropes[0].mrope_interleaved) == ((1, 2, 3), False)
    assert spec.image_row_width == spec.hidden_size
    assert spec.tie_word_embeddings
    spec = spec_of(qwen3_vl(mrope_section=[2, 2, 2], mrope_interleaved=True))
    assert (spec.ropes[0].mrope_sections, spec.ropes[0].mrope_interleaved) == ((2, 2, 2), True)
    assert spec.num_deepstack == 2
    assert spec.image_row_width == 3 * spec.hidden_size


@pytest.mark.parametrize("sections", [{}, {"mrope_section": [1, 2]}, {"mrope_section": [1, 2, 4]}])
def test_sections_that_do_not_deal_out_the_frequencies_are_refused(sections):
    with pytest.raises(ModelLoadError, match="mrope_section: sections must be 3 counts"):
        spec_of(qwen2_vl(**sections))


def test_another_layout_than_the_familys_is_refused():
    with pytest.raises(ModelLoadError, match="mrope_interleaved=False is not supported here"):
        spec_of(qwen3_vl(mrope_section=[2, 2, 2], mrope_interleaved=False))
    with pytest.raises(ModelLoadError, match="mrope_interleaved=True is not supported"):
        spec_of(qwen2_vl(mrope_section=[1, 2, 3], mrope_interleaved=True))


def test_more_deepstack_levels_than_layers_are_refused():
    with pytest.raises(ModelLoadError, match="2 deepstack levels for 1 layers"):
        spec_of(qwen3_vl(1, mrope_section=[2, 2, 2], mrope_interleaved=True))


def test_a_text_model_without_a_table_is_refused_by_name():
    text = {"model_type": "gpt2"}
    with pytest.raises(ModelLoadError, match="model_type 'gpt2' is not supported here; supported: llama, mistral"):
        spec_of(LlavaConfig(text_config=text))


def test_llavas_text_model_decides_its_own_form():
    for model_type, has_bias in (("llama", False), ("qwen2", True)):
        spec = spec_of(LlavaConfig(text_config=tiny.SIZES | {"model_type": model_type}))
        assert (spec.model_type, spec.qkv_bias) == ("llava", has_bias)
        assert spec.ropes[0].mrope_sections is None
