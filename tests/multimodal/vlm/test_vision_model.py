"""What holds for every vision-language checkpoint, on one of Qwen2-VL."""

import shutil

import pytest
import torch
import vision_oracle
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from izh.errors import ModelLoadError, RequestError
from izh.model.rope import Mrope
from izh.multimodal.vlm.model import VisionModel, is_vision_model

MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def case(folder):
    tokenizer = vision_oracle.tokenizer("<|vision_start|><|image_pad|><|vision_end|>", *MEDIA)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(MEDIA))
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    config = Qwen2VLConfig(
        vision_config={"depth": 2, "patch_size": 4, "num_heads": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        text_config=vision_oracle.TEXT | {"vocab_size": len(tokenizer), "rope_parameters": rope},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    images = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=256, max_pixels=1600)
    return vision_oracle.make(folder, Qwen2VLForConditionalGeneration, config, tokenizer, images)


@pytest.fixture
def vision(case):
    return case.vision


def user(*parts):
    return vision_oracle.messages([("user", list(parts))])[0]


PICTURE = vision_oracle.picture(40, 40)


@pytest.mark.parametrize("typed", [*MEDIA, "a<|image_pad|><|image_pad|>", "<|im<|image_pad|>age_pad|>"])
def test_a_typed_placeholder_is_text(case, vision, typed):
    prepared = vision.prepare([PICTURE])
    layout = vision.lay_out(user(f"before {typed} ", PICTURE, f" {typed} after"), prepared)
    assert len(layout.places[0]) == prepared[0].num_rows
    tokenizer = case.processor.tokenizer
    media = [token for token in layout.token_ids if token in tokenizer.convert_tokens_to_ids(list(MEDIA))]
    assert len(media) == prepared[0].num_rows + 2, "one start, the rows, one end"
    text = tokenizer.decode([token for token in layout.token_ids if token not in media])
    assert text.count(typed) == 2


def test_a_placeholder_put_together_from_parts_is_refused(vision):
    with pytest.raises(RequestError, match="wrote 1 images for 0"):
        vision.lay_out(user("<|image", "_pad|>"), [])


def test_more_images_than_parts_are_refused(vision):
    with pytest.raises(RequestError, match="wrote 1 images for 2"):
        vision.lay_out(user(PICTURE), vision.prepare([PICTURE, PICTURE]))


def test_a_part_that_is_neither_text_nor_image_is_refused(vision):
    with pytest.raises(RequestError, match="must be a text or an image, got type 'video'") as caught:
        vision.lay_out([{"role": "user", "content": [{"type": "video"}]}], [])
    assert caught.value.param == "messages[0].content[0]"


def test_an_image_the_processor_refuses_is_a_request_error(vision):
    with pytest.raises(RequestError, match="aspect ratio"):
        vision.prepare([vision_oracle.picture(450, 2)])


def test_the_length_is_known_before_anything_is_encoded(vision):
    prepared = vision.prepare([PICTURE, vision_oracle.picture(20, 60)])
    layout = vision.lay_out(user("x", PICTURE, "y", PICTURE), prepared)
    prompt = layout.prompt(vision.encode(prepared))
    assert prompt.token_ids == layout.token_ids
    assert sorted(prompt.image_rows) == [place for places in layout.places for place in places]


def test_images_of_several_requests_are_encoded_in_one_call(vision):
    pictures = [vision_oracle.picture(40, 40, 1), vision_oracle.picture(21, 66), vision_oracle.picture(64, 32)]
    alone = [vision.encode(vision.prepare([each]))[0] for each in pictures]
    together = vision.encode([vision.prepare([each])[0] for each in pictures])
    for one, other in zip(alone, together, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() < 1e-5
    assert vision.encode([]) == []


def test_an_image_is_named_by_its_pixels_and_the_tower(vision, folder, case, tmp_path):
    changed = PICTURE.copy()
    changed.putpixel((3, 3), (0, 0, 0))
    first, again, other = (vision.prepare([each])[0].digest for each in (PICTURE, PICTURE.copy(), changed))
    assert first == again != other
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    weights["visual.merger.mlp.0.bias"] = weights["visual.merger.mlp.0.bias"] + 1
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert VisionModel.load(copy).prepare([PICTURE])[0].digest != first


def test_a_tower_that_is_not_whole_is_refused_by_name(folder, case, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    del weights["visual.merger.mlp.0.bias"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks visual\.merger\.mlp\.0\.bias"):
        VisionModel.load(copy)


def test_the_language_model_is_not_held_twice(vision):
    names = [name for name, parameter in vision.family.model.named_parameters() if parameter.numel() > 64]
    assert names
    assert all(name.startswith("visual.") for name in names)


def test_the_decoder_knows_its_own_sections(case, vision):
    assert case.loaded.model.rotary[0].mrope == Mrope(vision.family.sections)


def test_what_takes_images_is_told_from_what_does_not(folder, case, tmp_path):
    assert is_vision_model(folder)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not is_vision_model(tmp_path)
    with pytest.raises(ModelLoadError, match=r"'llama' takes no images here; supported: .*qwen2_vl"):
        VisionModel.load(tmp_path)


def test_typed_text_with_half_a_surrogate_is_refused(vision):
    with pytest.raises(RequestError, match="not valid Unicode"):
        vision.lay_out(user("a\ud800"), [])


def test_rows_do_not_carry_gradients_or_views(vision):
    rows = vision.encode(vision.prepare([PICTURE]))[0]
    assert not rows.requires_grad
    assert rows.dtype is torch.float32
