"""The border where features become the engine's own: every field checked, copied, and named by its values."""

import numpy as np
import pytest
import torch
from image_cases import HEAD_DIM, HIDDEN, PLACEHOLDER, SECTIONS, features, prompt

from izh.errors import RequestError
from izh.multimodal.features import validate_features
from izh.multimodal.prompt import expand_images


def check(made, dtype=torch.float32, **changed):
    fields = {name: value for name, value in (made.features() | changed).items() if value is not ...}
    return validate_features(
        fields, num_tokens=len(made.token_ids), hidden_size=HIDDEN, rotary_dim=HEAD_DIM, dtype=dtype
    )


@pytest.fixture
def made():
    return prompt(3, (1, 2, 3), 2, (2, 2, 1), (1, 1, 1), 4)


def test_spans_are_the_images_also_side_by_side(made):
    assert [(span.start, span.stop) for span in check(made).spans] == [(3, 9), (11, 15), (15, 16)]
    rows = prompt((1, 1, 1), (1, 3, 1), (1, 2, 2), (2, 1, 1), (1, 1, 1))
    assert [(s.start, s.stop) for s in check(rows).spans] == [(0, 1), (1, 4), (4, 8), (8, 10), (10, 11)]


def test_rows_and_positions_are_what_was_sent_and_go_on_with_delta(made):
    got = check(made)
    assert got.num_tokens == len(made.token_ids)
    assert got.delta == made.delta
    assert got.sections == SECTIONS
    for place, row in made.image_rows.items():
        places, rows = got.rows_of(place, place + 1)
        assert places.tolist() == [place]
        assert rows[0].tolist() == row.tolist()
    assert got.rows_of(0, 3)[0].size == 0
    assert got.rows_of(8, 12)[0].tolist() == [8, 11]
    total = got.num_tokens
    assert got.positions_of(0, total).tolist() == made.positions.tolist()
    assert got.positions_of(total - 1, total + 3)[0].tolist() == [total + made.delta + i for i in (-1, 0, 1, 2)]
    assert got.positions_of(total + 5, total + 6).tolist() == [[total + 5 + made.delta]] * 3


def test_it_is_a_copy_that_nobody_can_write():
    made = prompt(1, (1, 2, 2), 1)
    got = check(made)
    before = got.rows.copy(), got.positions.copy()
    for row in made.image_rows.values():
        row.zero_()
    made.positions.zero_()
    assert np.array_equal(got.rows, before[0])
    assert np.array_equal(got.positions, before[1])
    for array in (got.rows, got.positions, got.places):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_numpy_and_half_precision_are_taken(made):
    rows = {place: row.numpy() for place, row in made.image_rows.items()}
    same = check(made, image_rows=rows, positions=made.positions.numpy())
    assert [s.digest for s in same.spans] == [s.digest for s in check(made).spans]
    half = {place: row.bfloat16() for place, row in made.image_rows.items()}
    assert check(made, image_rows=half).rows[0].tolist() == half[3].float().tolist()


def test_text_alone_has_no_spans():
    assert check(prompt(5)).spans == ()


@pytest.mark.parametrize("name", ["image_rows", "positions", "delta", "sections"])
def test_every_field_is_needed(made, name):
    with pytest.raises(RequestError, match="must have exactly the fields") as caught:
        check(made, **{name: ...})
    assert caught.value.param == "features"


def test_other_fields_are_refused(made):
    with pytest.raises(RequestError, match="exactly the fields"):
        check(made, digest=b"trust me")
    with pytest.raises(RequestError, match="exactly the fields"):
        validate_features([1], num_tokens=1, hidden_size=HIDDEN, rotary_dim=HEAD_DIM)


@pytest.mark.parametrize("wrong", [(2, 3), (2, 3, 4), (2.0, 3, 3), (9, -1, 0), "233", 8, (True, 4, 3)])
def test_sections_are_three_counts_that_fill_the_head(made, wrong):
    refused("sections", made, sections=wrong)


@pytest.mark.parametrize("wrong", [0, -6, 5, None, True, -5.0])
def test_delta_must_be_the_positions_own(made, wrong):
    assert made.delta == -5
    refused("delta", made, delta=wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(3, 5, dtype=torch.long),
        torch.zeros(20, dtype=torch.long),
        torch.zeros(3, 20),
        [[0] * 20] * 3,
        None,
    ],
)
def test_positions_are_integers_of_the_prompts_length(made, wrong):
    refused("positions", made, positions=wrong)


@pytest.mark.parametrize(
    ("axis", "place", "by"),
    [
        (0, 0, 1),  # does not begin at 0
        (0, 0, -1),  # negative
        (1, 1, 1),  # text whose axes differ
        (0, 3, 1),  # an image that does not begin at the cursor
        (2, 5, 40),  # leaves its image
        (1, 5, -2),  # falls behind its image's first row
        (0, 9, -1),  # text that goes back
        (2, 19, 1),  # text that skips
        (0, 5, 2**62),
        (0, 5, -(2**62)),
    ],
)
def test_positions_that_no_prompt_has_are_refused(made, axis, place, by):
    positions = made.positions.clone()
    positions[axis, place] += by
    refused("positions", made, positions=positions, delta=int(positions.max()) + 1 - positions.shape[1])


def test_a_jump_of_all_text_is_refused():
    """Consistent with its delta, but not a position that texts and images give."""
    made = prompt(4)
    refused("positions", made, positions=made.positions * 2, delta=3)


@pytest.mark.parametrize("place", [-1, 20, "3", 3.5, True])
def test_rows_lie_within_the_prompt(made, place):
    refused("image_rows", made, image_rows=made.image_rows | {place: torch.zeros(HIDDEN)})


@pytest.mark.parametrize(
    "row",
    [torch.zeros(HIDDEN + 1), torch.zeros(1, HIDDEN), torch.zeros(HIDDEN, dtype=torch.long), [0.0] * HIDDEN, None],
)
def test_rows_are_vectors_of_the_decoders_width(made, row):
    refused("image_rows", made, image_rows=made.image_rows | {5: row})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_are_finite(made, value):
    made.image_rows[5][9] = value
    assert "position 5" in refused("image_rows", made)


def test_rows_are_finite_in_the_decoders_dtype(made):
    made.image_rows[5][9] = 70_000.0
    check(made, torch.bfloat16)
    with pytest.raises(RequestError, match=r"70000.0 in column 9.*float16"):
        check(made, torch.float16)
    refused("image_rows", made, image_rows=made.image_rows | {5: torch.full((HIDDEN,), 1e300, dtype=torch.float64)})


def test_a_row_missing_within_an_image_or_extra_in_text_is_refused():
    made = prompt(2, (1, 2, 2), 3)
    rows = dict(made.image_rows)
    del rows[4]
    refused("positions", made, image_rows=rows)
    extended = check(made, image_rows=made.image_rows | {8: torch.zeros(HIDDEN)})
    assert [(s.start, s.stop) for s in extended.spans] == [(2, 6), (8, 9)], "a row on a text token is an image of one"


def refused(name, made, **changed):
    with pytest.raises(RequestError) as caught:
        check(made, **changed)
    assert caught.value.param == f"features.{name}"
    assert caught.value.message.startswith(f"features.{name} ")
    return caught.value.message


def test_an_images_digest_is_its_values_and_shape_wherever_it_lies():
    def digest_of(rows, grid, before=2, after=1, sections=SECTIONS):
        ids = [10] * before + [PLACEHOLDER] + [11] * after
        made = expand_images(ids, PLACEHOLDER, [rows], [grid], sections)
        return features(made).spans[0].digest

    rows = prompt((1, 2, 3)).image_rows
    image = torch.stack(list(rows.values()))
    base = digest_of(image, (1, 2, 3))
    assert digest_of(image, (1, 2, 3), before=7, after=5) == base
    assert digest_of(image.clone(), (1, 2, 3)) == base
    nearly = image.clone()
    nearly[5, 63] = torch.nextafter(nearly[5, 63], torch.tensor(10.0))
    others = [
        digest_of(nearly, (1, 2, 3)),
        digest_of(image, (1, 3, 2)),
        digest_of(image, (6, 1, 1)),
        digest_of(image, (1, 2, 3), sections=(4, 2, 2)),
        digest_of(image.flip(0), (1, 2, 3)),
    ]
    assert len({base, *others}) == 6


def plain(num_tokens, *runs):
    """Features of a prompt for a model with one position axis, its rows in these runs."""
    places = [place for start, stop in runs for place in range(start, stop)]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(places), HIDDEN, generator=generator)
    return {
        "image_rows": dict(zip(places, rows, strict=True)),
        "positions": torch.arange(num_tokens).expand(3, -1),
        "delta": 0,
        "sections": None,
    }


def validated(fields, num_tokens):
    return validate_features(fields, num_tokens=num_tokens, hidden_size=HIDDEN, rotary_dim=HEAD_DIM)


def test_without_sections_rows_side_by_side_are_one_span():
    found = validated(plain(12, (0, 3), (5, 6), (8, 12)), 12)
    assert [(span.start, span.stop) for span in found.spans] == [(0, 3), (5, 6), (8, 12)]
    assert found.sections is None
    assert found.positions_of(10, 14).tolist() == [[10, 11, 12, 13]] * 3


def test_without_sections_a_span_is_named_by_its_rows():
    fields, other = plain(12, (2, 6), (8, 9)), plain(12, (2, 6), (8, 9))
    other["image_rows"][5] = other["image_rows"][5] * 2
    first, second = validated(fields, 12).spans, validated(other, 12).spans
    assert first[0].digest != second[0].digest
    assert first[1].digest == second[1].digest


@pytest.mark.parametrize(("place", "value"), [(0, 1), (4, 3), (11, 12)])
def test_without_sections_every_position_is_the_place(place, value):
    fields = plain(12, (2, 6))
    fields["positions"] = fields["positions"].clone()
    fields["positions"][1, place] = value
    with pytest.raises(RequestError, match=f"at {place} must be {place} on every axis") as caught:
        validated(fields, 12)
    assert caught.value.param == "features.positions"
