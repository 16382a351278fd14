"""A prompt's placeholders become the positions that its images take.

Owns: `expand_images` and VisionPrompt, its result: tokens, rows and rotary positions of a whole prompt, computed once.
Must not know: chunks, blocks, the engine. Runs before the length check: an image of 16 rows is 16 tokens long.

    ids        a  b  [image 2x3]  c       T = 3 texts + 6 rows = 9
    time       0  1  2 2 2 2 2 2  5       text advances all three axes together;
    height     0  1  2 2 2 3 3 3  5       inside an image each axis is the cursor plus its own coordinate;
    width      0  1  2 3 4 2 3 4  5       after it the cursor has moved by max(grid) = 3
    delta = cursor - T = 6 - 9 = -3: what a later token adds to its place in the sequence
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from izh.errors import RequestError

Grid = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class VisionPrompt:
    """An expanded prompt of T tokens.

    `image_rows` maps a position in the prompt to the row [D] (on the CPU) that replaces its token's embedding.
    `positions` [3, T] int64 are rotary coordinates (time, height, width), `delta` what positions after the prompt add
    to their place, `sections` how many frequency pairs turn with each axis; None for a model with one axis, in which
    all three coordinates are the place itself.
    """

    token_ids: list[int]
    image_rows: dict[int, Tensor]
    positions: Tensor
    delta: int
    sections: tuple[int, int, int] | None

    def features(self) -> dict[str, Any]:
        """What travels with the request besides its tokens; `validate_features` reads it at the other end."""
        return {
            "image_rows": self.image_rows,
            "positions": self.positions,
            "delta": self.delta,
            "sections": self.sections,
        }


def expand_images(
    ids: Many[int],
    placeholder_id: int,
    embeddings: Many[Tensor] | Tensor,
    grids: Many[Grid],
    sections: tuple[int, int, int],
) -> VisionPrompt:
    """Replace the i-th placeholder in `ids` by t*h*w reserved ids (the placeholder's own) for image i.

    Shapes: embeddings[i] [t*h*w, D], rows in reading order (time, then height, then width); grids[i] = (t, h, w).
    Raises: RequestError (a ValueError) when placeholders, embeddings and grids do not correspond one to one, a grid has
    a zero, the rows do not match the grid or each other's width, or the sections are not three counts.
    """
    if len(sections) != 3 or min(sections) < 0 or sum(sections) == 0:
        raise RequestError(f"sections must be three counts of frequency pairs, got {sections}", "sections")
    places = [place for place, token in enumerate(ids) if token == placeholder_id]
    if not len(places) == len(embeddings) == len(grids):
        raise RequestError(
            f"the prompt has {len(places)} image placeholders (token {placeholder_id}) for {len(embeddings)} embedded "
            f"images and {len(grids)} grids; they must be as many"
        )
    token_ids: list[int] = []
    image_rows: dict[int, Tensor] = {}
    positions: list[Tensor] = []
    cursor = done = 0
    for index, (place, grid) in enumerate(zip(places, grids, strict=True)):
        rows = _rows(index, embeddings[index], grid)
        width = next(iter(image_rows.values())).shape[0] if image_rows else rows.shape[1]
        if rows.shape[1] != width:
            raise RequestError(f"embeddings[{index}] has rows of width {rows.shape[1]}, the images before it {width}")
        text = place - done
        token_ids += ids[done:place]
        positions.append(_text(cursor, text))
        positions.append(cursor + text + _coordinates(grid))
        image_rows.update(enumerate(rows, start=len(token_ids)))
        token_ids += [placeholder_id] * len(rows)
        cursor += text + max(grid)
        done = place + 1
    token_ids += ids[done:]
    positions.append(_text(cursor, len(ids) - done))
    cursor += len(ids) - done
    return VisionPrompt(
        token_ids, image_rows, torch.cat(positions, 1), cursor - len(token_ids), (sections[0], sections[1], sections[2])
    )


def _rows(index: int, embedding: Tensor, grid: Grid) -> Tensor:
    """A copy of the image's rows on the CPU, [t*h*w, D]."""
    if len(grid) != 3 or min(grid) < 1:
        raise RequestError(f"grids[{index}] must be three counts of at least 1 (time, height, width), got {grid}")
    count = grid[0] * grid[1] * grid[2]
    if embedding.dim() != 2 or embedding.shape[0] != count:
        raise RequestError(
            f"embeddings[{index}] must be [{count}, width] for grid {tuple(grid)}, got {list(embedding.shape)}"
        )
    return embedding.detach().to("cpu", copy=True)


def _text(cursor: int, count: int) -> Tensor:
    """[3, count]: all three coordinates advance together."""
    return torch.arange(cursor, cursor + count).expand(3, -1)


def _coordinates(grid: Grid) -> Tensor:
    """[3, t*h*w]: each row's place in the grid."""
    return torch.stack(torch.meshgrid(*(torch.arange(size) for size in grid), indexing="ij")).flatten(1)
