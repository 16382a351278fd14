"""Idefics3 and SmolVLM through our engine, against transformers' own models."""

import pytest
import torch
import vision_oracle
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

MEDIA = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 6,
}
MODELS = {
    "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessorPil),
    "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil),
}
NUM_ROWS = 4  # of a tile: 24 / 6 patches a side, 2 x 2 of them one row


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    config_class, model_class, images_class = MODELS[request.param]
    tokenizer = vision_oracle.tokenizer("<image>", *MEDIA, "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>")
    config = config_class(
        vision_config=VISION,
        text_config=vision_oracle.TEXT | {"vocab_size": len(tokenizer), "model_type": "llama"},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=request.param == "smolvlm",
    )
    images = images_class(size={"longest_edge": 72}, max_image_size={"longest_edge": 24})
    options = {"image_seq_len": NUM_ROWS}
    return vision_oracle.make(tmp_path_factory.mktemp(request.param), model_class, config, tokenizer, images, options)


def rows(model, inputs):
    features = model.get_image_features(inputs["pixel_values"], inputs["pixel_attention_mask"], return_dict=True)
    return torch.cat(list(features.pooler_output))


@pytest.mark.parametrize("name", vision_oracle.CONVERSATIONS)
def test_a_conversation_equals_the_official_model(case, name):
    prompt = case.check(vision_oracle.CONVERSATIONS[name], rows)
    assert prompt.sections is None


def test_an_image_is_as_many_tiles_as_its_shape_asks_for(case):
    square, wide = case.vision.prepare([vision_oracle.picture(40, 40), vision_oracle.picture(90, 24)])
    assert len(square.tensors["pixel_values"]) == 10, "3 x 3, and the whole"
    assert len(wide.tensors["pixel_values"]) == 4, "1 x 3, and the whole"
    assert (square.num_rows, wide.num_rows) == (10 * NUM_ROWS, 4 * NUM_ROWS)


def test_images_are_written_as_smolvlms_own_processor_writes_them(case):
    for image, tiles in [(vision_oracle.picture(40, 40), (3, 3)), (vision_oracle.picture(90, 24), (1, 3))]:
        (prepared,) = case.vision.prepare([image])
        assert prepared.text == get_image_prompt_string(
            *tiles, NUM_ROWS, "<fake_token_around_image>", "<image>", "<global-img>"
        )


def test_images_of_several_requests_are_encoded_in_one_call(case):
    pictures = [vision_oracle.picture(40, 40), vision_oracle.picture(90, 24), vision_oracle.picture(20, 61)]
    prepared = case.vision.prepare(pictures)
    alone = [case.vision.encode([image])[0] for image in prepared]
    for one, other in zip(alone, case.vision.encode(prepared), strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() < vision_oracle.ROWS_BOUND
