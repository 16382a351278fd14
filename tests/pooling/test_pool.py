"""Pooling by its words, on padded and on packed rows."""

import pytest
import torch

from izh.pooling import pool_hidden
from izh.pooling.pool import pool_packed

HIDDEN = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
RIGHT = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
LEFT = RIGHT.flip(1)


def test_mean_is_over_visible_positions() -> None:
    out = pool_hidden(HIDDEN, RIGHT, "mean", normalize=False)
    torch.testing.assert_close(out, torch.stack([HIDDEN[0, :3].mean(0), HIDDEN[1].mean(0), HIDDEN[2, 0]]))


@pytest.mark.parametrize("mask", [RIGHT, LEFT, RIGHT.bool(), torch.tensor([[1, 0, 1, 0, 0]] * 3)])
def test_last_is_the_last_visible_position_wherever_padding_lies(mask: torch.Tensor) -> None:
    last = [max(i for i, seen in enumerate(row) if seen) for row in mask.tolist()]
    expected = torch.stack([HIDDEN[row, at] for row, at in enumerate(last)])
    assert torch.equal(pool_hidden(HIDDEN, mask, "last", normalize=False), expected)


def test_cls_is_position_0_which_must_be_visible() -> None:
    assert torch.equal(pool_hidden(HIDDEN, RIGHT, "cls", normalize=False), HIDDEN[:, 0])
    with pytest.raises(ValueError, match="row 0 hides position 0"):
        pool_hidden(HIDDEN, LEFT, "cls")


@pytest.mark.parametrize("mode", ["mean", "last", "cls"])
def test_vectors_have_length_1_by_default_and_are_float32(mode: str) -> None:
    out = pool_hidden(HIDDEN.half(), RIGHT, mode)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.norm(dim=1), torch.ones(3))
    plain = pool_hidden(HIDDEN.half(), RIGHT, mode, normalize=False)
    torch.testing.assert_close(out, plain / plain.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("mode", ["mean", "last", "cls"])
def test_padding_has_no_part_in_it(mode: str, poison: float) -> None:
    spoiled = HIDDEN.masked_fill(RIGHT[..., None] == 0, poison)
    assert torch.equal(pool_hidden(spoiled, RIGHT, mode), pool_hidden(HIDDEN, RIGHT, mode))


@pytest.mark.parametrize(
    ("hidden", "mask", "mode", "says"),
    [
        (HIDDEN, RIGHT, "median", "mode 'median' is not known"),
        (HIDDEN[0], RIGHT, "mean", r"hidden: shape \(5, 4\)"),
        (HIDDEN, RIGHT[:2], "mean", r"mask: shape \(2, 5\)"),
        (HIDDEN, RIGHT[0], "mean", r"mask: shape \(5,\)"),
        (HIDDEN, RIGHT * torch.tensor([[1], [0], [1]]), "mean", "row 1 has no visible token"),
        (HIDDEN, RIGHT * 0, "last", "row 0 has no visible token"),
    ],
)
def test_what_cannot_be_pooled_is_refused(hidden: torch.Tensor, mask: torch.Tensor, mode: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pool_hidden(hidden, mask, mode)


@pytest.mark.parametrize("mode", ["mean", "last", "cls"])
def test_packed_rows_give_what_padded_ones_give(mode: str) -> None:
    packed = pool_packed(HIDDEN[RIGHT != 0], [0, 3, 8, 9], (mode,), [0, 0, 0])
    torch.testing.assert_close(packed, pool_hidden(HIDDEN, RIGHT, mode, normalize=False))


def test_modes_stand_side_by_side_and_prompts_can_be_left_out() -> None:
    rows = HIDDEN.reshape(15, 4)
    out = pool_packed(rows, [0, 5, 15], ("max", "weighted_mean", "mean_sqrt_len", "cls"), [2, 0])
    kept, weights = rows[2:5], torch.tensor([3.0, 4.0, 5.0])[:, None]
    weighted = (kept * weights).sum(0) / 12
    torch.testing.assert_close(out[0], torch.cat([kept.amax(0), weighted, kept.sum(0) / 3**0.5, rows[2]]))
    torch.testing.assert_close(out[1, :4], rows[5:].amax(0))


def test_a_sequence_that_is_all_prompt_gives_zeros_as_in_sentence_transformers() -> None:
    out = pool_packed(HIDDEN[0], [0, 2, 5], ("mean",), [2, 1])
    assert torch.equal(out[0], torch.zeros(4))
    assert out[1].norm() > 0
