"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL through our engine, against transformers' own models."""

import pytest
import torch
import vision_oracle
import vlms


@pytest.fixture(scope="module", params=vlms.QWEN)
def case(request, tmp_path_factory):
    return vlms.qwen(request.param, tmp_path_factory.mktemp(request.param))


def rows(model, inputs):
    features = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
    levels = [features.pooler_output, *getattr(features, "deepstack_features", [])]
    return torch.cat([torch.cat(list(level)) for level in levels], dim=1)


@pytest.mark.parametrize("name", vision_oracle.CONVERSATIONS)
def test_a_conversation_equals_the_official_model(case, name):
    case.check(vision_oracle.CONVERSATIONS[name], rows)
