"""Expansion: the documented example in full, several images, every mismatch refused, and Qwen2-VL's own positions."""

import pytest
import torch
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from izh.multimodal import expand_images

IMG, SECTIONS = 99, (2, 3, 3)


def rows(count, start=0, width=4):
    return torch.arange(start, start + count * width, dtype=torch.float32).view(count, width)


def test_text_image_text():
    embedding = rows(6)
    made = expand_images([1, 2, IMG, 3], IMG, [embedding], [(1, 2, 3)], SECTIONS)
    assert made.token_ids == [1, 2, *[IMG] * 6, 3]
    assert made.positions.dtype == torch.int64
    assert made.positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert made.delta == 6 - 9
    assert made.sections == SECTIONS
    assert sorted(made.image_rows) == list(range(2, 8))
    assert all(torch.equal(made.image_rows[2 + i], embedding[i]) for i in range(6))


def test_images_at_the_ends_and_side_by_side():
    made = expand_images(
        [IMG, IMG, 5, IMG], IMG, [rows(4), rows(2, 50), rows(3, 90)], [(1, 2, 2), (2, 1, 1), (1, 1, 3)], SECTIONS
    )
    assert made.token_ids == [IMG] * 6 + [5] + [IMG] * 3
    assert made.positions.tolist() == [
        [0, 0, 0, 0, 2, 3, 4, 5, 5, 5],
        [0, 0, 1, 1, 2, 2, 4, 5, 5, 5],
        [0, 1, 0, 1, 2, 2, 4, 5, 6, 7],
    ]
    assert made.delta == 8 - 10
    assert torch.equal(made.image_rows[4], rows(2, 50)[0])
    assert torch.equal(made.image_rows[9], rows(3, 90)[2])


def test_without_images_it_is_plain_text():
    made = expand_images([1, 2, 3], IMG, [], [], SECTIONS)
    assert made.token_ids == [1, 2, 3]
    assert made.image_rows == {}
    assert made.positions.tolist() == [[0, 1, 2]] * 3
    assert made.delta == 0


def test_a_batch_of_encoder_rows_is_taken_as_it_comes_detached_and_copied():
    batch = torch.ones(2, 4, 8, requires_grad=True)
    made = expand_images([IMG, 1, IMG], IMG, batch, [(1, 2, 2)] * 2, SECTIONS)
    with torch.no_grad():
        batch.zero_()
    for row in made.image_rows.values():
        assert not row.requires_grad
        assert torch.equal(row, torch.ones(8))


def test_features_are_the_fields_that_travel():
    made = expand_images([1, IMG], IMG, [rows(1)], [(1, 1, 1)], SECTIONS)
    features = made.features()
    assert set(features) == {"image_rows", "positions", "delta", "sections"}
    assert features["image_rows"] is made.image_rows
    assert features["positions"] is made.positions
    assert (features["delta"], features["sections"]) == (made.delta, SECTIONS)


@pytest.mark.parametrize(
    ("ids", "embeddings", "grids", "says"),
    [
        ([1, IMG, IMG], [rows(1)], [(1, 1, 1)], "2 image placeholders .* 1 embedded images and 1 grids"),
        ([1], [rows(1)], [(1, 1, 1)], "0 image placeholders"),
        ([IMG], [], [(1, 1, 1)], "0 embedded images"),
        ([IMG], [rows(1)], [], "0 grids"),
        ([IMG], [rows(1)], [(1, 0, 1)], "at least 1"),
        ([IMG], [rows(1)], [(1, 1)], "three counts"),
        ([IMG], [rows(5)], [(1, 2, 2)], r"embeddings\[0\] must be \[4, width\]"),
        ([IMG], [rows(4)[0]], [(1, 2, 2)], r"embeddings\[0\] must be \[4, width\]"),
        ([IMG, IMG], [rows(1), rows(1, width=5)], [(1, 1, 1)] * 2, "width 5, the images before it 4"),
    ],
)
def test_what_does_not_correspond_is_refused(ids, embeddings, grids, says):
    with pytest.raises(ValueError, match=says):
        expand_images(ids, IMG, embeddings, grids, SECTIONS)


@pytest.mark.parametrize("sections", [(1, 2), (0, 0, 0), (3, -1, 2)])
def test_sections_are_three_counts(sections):
    with pytest.raises(ValueError, match="sections must be three counts"):
        expand_images([1], IMG, [], [], sections)


def test_positions_and_delta_are_those_of_qwen2_vl():
    config = Qwen2VLConfig(
        text_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "vocab_size": 128,
        },
        vision_config={"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "spatial_merge_size": 1},
    )
    model = Qwen2VLModel(config)
    grids = [(1, 2, 3), (1, 4, 2), (1, 1, 1)]
    ids = [1, 2, 3, IMG, 4, IMG, 5, 6, IMG, 7]
    made = expand_images(ids, IMG, [rows(h * w) for _, h, w in grids], grids, SECTIONS)
    tokens = torch.tensor([made.token_ids])
    positions, delta = model.get_rope_index(
        tokens, mm_token_type_ids=(tokens == IMG).int(), image_grid_thw=torch.tensor(grids)
    )
    assert made.positions.tolist() == positions[:, 0].tolist()
    assert made.delta == delta.item()
