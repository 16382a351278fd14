"""InternVL through our engine, against transformers' own model."""

import pytest
import vision_oracle
from transformers import InternVLConfig, InternVLForConditionalGeneration
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

NAMES = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": [24, 24],
    "patch_size": [6, 6],
}
NUM_ROWS = 4  # of a tile: 24 / 6 patches a side, 2 x 2 of them one row


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def case(request, tmp_path_factory):
    tokenizer = vision_oracle.tokenizer("<IMG_CONTEXT>\n", **NAMES)
    config = InternVLConfig(
        vision_config=VISION,
        text_config=vision_oracle.TEXT | {"vocab_size": len(tokenizer), "model_type": request.param},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=NUM_ROWS,
        tie_word_embeddings=request.param == "qwen2",
    )
    images = GotOcr2ImageProcessorPil(size={"height": 24, "width": 24}, max_patches=6)
    options = {"image_seq_length": NUM_ROWS}
    folder = tmp_path_factory.mktemp(request.param)
    return vision_oracle.make(folder, InternVLForConditionalGeneration, config, tokenizer, images, options)


def rows(model, inputs):
    return model.get_image_features(inputs["pixel_values"], return_dict=True).pooler_output.flatten(0, 1)


@pytest.mark.parametrize("name", vision_oracle.CONVERSATIONS)
def test_a_conversation_equals_the_official_model(case, name):
    prompt = case.check(vision_oracle.CONVERSATIONS[name], rows)
    assert prompt.sections is None


def test_an_image_is_as_many_tiles_as_its_shape_asks_for(case):
    square, wide = case.vision.prepare([vision_oracle.picture(24, 24), vision_oracle.picture(90, 24)])
    assert (square.num_rows, wide.num_rows) == (NUM_ROWS, 5 * NUM_ROWS)
    assert wide.text == "<img>" + "<IMG_CONTEXT>" * wide.num_rows + "</img>"
