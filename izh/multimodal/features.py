"""A request's images as the engine holds them: checked, copied, named.

Owns: Features and ImageSpan; `validate_features`, the border where what travelled with a request becomes Features.
Must not know: how features travel, blocks, chunks, the model beyond its width, dtype and rotary width.
Invariants: arrays are the engine's own and read-only; names are digests of values, which nobody can assert.

Every position is a function of what came before it, and is checked to be: a text token, and an image's first row, have
three equal coordinates, one more than the largest so far; an image of n rows stays within the n positions from there.
So rotary positions never exceed physical ones (delta <= 0), and the length check bounds both.

A model with one position axis has no sections. There every position is the token's place, and rows side by side are one
span.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from izh.cache.keys import digest
from izh.errors import RequestError
from izh.request import PackedFeatures

FIELDS = ("image_rows", "positions", "delta", "sections")


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """One image's place in the prompt, start .. stop-1, and the digest of what it puts there: its rows, how they lie in
    time, height and width, and the sections by which that turns the frequencies."""

    start: int
    stop: int
    digest: bytes


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Features:
    """The images of a prompt of T tokens. Arrays are read-only."""

    spans: tuple[ImageSpan, ...]  # by place, not overlapping
    places: NDArray[np.int64]  # [R]: the position of each row, ascending
    rows: NDArray[np.float32]  # [R, D]
    positions: NDArray[np.int64]  # [3, T]: time, height, width
    delta: int
    sections: tuple[int, int, int] | None  # None: one position axis

    @property
    def num_tokens(self) -> int:
        """T, the prompt's length."""
        return self.positions.shape[1]

    def positions_of(self, start: int, stop: int) -> NDArray[np.int64]:
        """[3, stop - start]: rotary coordinates of these positions of the sequence, also beyond the prompt."""
        beyond = np.arange(max(start, self.num_tokens), stop) + self.delta
        return np.concatenate([self.positions[:, start:stop], np.broadcast_to(beyond, (3, len(beyond)))], axis=1)

    def rows_of(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Positions [n] within start .. stop-1 that have a row, and these rows [n, D]."""
        first, last = np.searchsorted(self.places, (start, stop))
        return self.places[first:last], self.rows[first:last]


def validate_features(
    features: Mapping[str, Any] | PackedFeatures,
    *,
    num_tokens: int,
    hidden_size: int,
    rotary_dim: int,
    dtype: torch.dtype = torch.float32,
) -> Features:
    """Check what travelled with a prompt of `num_tokens` tokens and take a copy of it.

    `features` is what `VisionPrompt.features` gives, or the same packed. Tensors may also be numpy arrays. Row values
    must be finite in `dtype`, that of the decoder. `hidden_size` is a row's width (`ModelSpec.image_row_width`).
    Raises: RequestError (a ValueError) whose `param` is the field at fault, "features.positions" for instance.
    """
    fields = _unpacked(features) if isinstance(features, PackedFeatures) else features
    check_fields(fields)
    sections = _sections(fields["sections"], rotary_dim)
    places, rows = _rows(fields["image_rows"], num_tokens, hidden_size)
    _check_finite(places, rows, dtype)
    positions = _positions(fields["positions"], num_tokens)
    starts, stops = _check_places(positions, places) if sections is None else _check_positions(positions, places)
    delta = fields["delta"]
    expected = int(positions.max()) + 1 - num_tokens
    if not _is_int(delta) or delta != expected:
        _refuse("delta", f"must be {expected}, the next text position minus the prompt's length, got {delta!r}")
    spans = tuple(_span(*bounds, places, rows, positions, sections) for bounds in zip(starts, stops, strict=True))
    return Features(spans, places, rows, positions, expected, sections)


def check_fields(features: Any) -> None:
    """Raises RequestError unless `features` is a mapping with the right names."""
    if not isinstance(features, Mapping) or set(features) != set(FIELDS):
        got = sorted(map(str, features)) if isinstance(features, Mapping) else type(features).__name__
        _refuse("", f"must have exactly the fields {', '.join(FIELDS)}, got {got}")


def _refuse(name: str, problem: str) -> NoReturn:
    param = f"features.{name}" if name else "features"
    raise RequestError(f"{param} {problem}", param)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _sections(value: Any, rotary_dim: int) -> tuple[int, int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 3 or not all(_is_int(v) and v >= 0 for v in value):
        _refuse("sections", f"must be three counts of frequency pairs, got {value!r}")
    if 2 * sum(value) != rotary_dim:
        _refuse("sections", f"must sum to {rotary_dim // 2}, half the rotated width, got {tuple(value)}")
    return value[0], value[1], value[2]


def _unpacked(packed: PackedFeatures) -> dict[str, Any]:
    """The fields as arrays over the bytes, which nobody can write; `image_rows` is the pair of places and rows."""
    places = _array("image_rows", packed.places, np.int64, (-1,))
    rows = _array("image_rows", packed.rows, np.float32, (len(places), packed.width))
    positions = _array("positions", packed.positions, np.int64, (3, -1))
    return {
        "image_rows": (places, rows),
        "positions": positions,
        "delta": packed.delta,
        "sections": packed.sections,
    }


def _array(name: str, raw: bytes, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    try:
        return np.frombuffer(raw, np.dtype(dtype).newbyteorder("<")).reshape(shape)
    except ValueError as error:
        _refuse(name, f"must be {np.dtype(dtype)} {list(shape)}: {error}")


def _rows(value: Any, num_tokens: int, hidden_size: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Places [R] ascending and rows [R, D] float32."""
    if isinstance(value, tuple):
        places, rows = value
        if len(places) and (places[0] < 0 or places[-1] >= num_tokens or (np.diff(places) <= 0).any()):
            _refuse("image_rows", f"must be at ascending positions within 0..{num_tokens - 1}")
        if len(places) and rows.shape[1] != hidden_size:
            _refuse("image_rows", f"must have the model's width {hidden_size}, got {rows.shape[1]}")
        return places, rows.reshape(-1, hidden_size)
    return _copied_rows(value, num_tokens, hidden_size)


def _copied_rows(value: Any, num_tokens: int, hidden_size: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    if not isinstance(value, Mapping) or not all(_is_int(place) and 0 <= place < num_tokens for place in value):
        _refuse("image_rows", f"must map positions 0..{num_tokens - 1} to rows")
    places = sorted(value)
    rows = np.empty((len(places), hidden_size), np.float32)
    for index, place in enumerate(places):
        row = value[place]
        if isinstance(row, np.ndarray):
            row = torch.tensor(row)
        if not isinstance(row, Tensor) or not row.is_floating_point() or tuple(row.shape) != (hidden_size,):
            got = f"{row.dtype} {list(row.shape)}" if isinstance(row, Tensor) else type(row).__name__
            _refuse("image_rows", f"at position {place} must be {hidden_size} floating point numbers, got {got}")
        rows[index] = row.detach().float().cpu().numpy()
    return _frozen(np.array(places, np.int64)), _frozen(rows)


def _check_finite(places: NDArray[np.int64], rows: NDArray[np.float32], dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    # Not `>`: that is false for a NaN.
    wrong = ~(np.abs(rows) <= limit)
    if wrong.any():
        row_index, column = np.argwhere(wrong)[0]
        _refuse(
            "image_rows",
            f"at position {places[row_index]} has {rows[row_index, column]} in column {column}; every value must be "
            f"finite and at most {limit:g} ({dtype})",
        )


def _positions(value: Any, num_tokens: int) -> NDArray[np.int64]:
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.shape != (3, num_tokens):
        got = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(value).__name__
        _refuse("positions", f"must be integers [3, {num_tokens}], got {got}")
    return _frozen(array.astype(np.int64, copy=True))


def _check_places(positions: NDArray[np.int64], places: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Refuse positions other than the tokens' places. Returns where each run of rows starts and stops."""
    wrong = np.flatnonzero((positions != np.arange(positions.shape[1])).any(axis=0))
    if len(wrong):
        got = positions[:, wrong[0]].tolist()
        _refuse("positions", f"at {wrong[0]} must be {wrong[0]} on every axis without sections, got {got}")
    starts = places[np.diff(places, prepend=-2) > 1]
    stops = places[np.diff(places, append=positions.shape[1] + 1) > 1] + 1
    return starts.tolist(), stops.tolist()


def _check_positions(positions: NDArray[np.int64], places: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Refuse positions that no sequence of texts and images has. Returns where each image starts and stops."""
    num_tokens = positions.shape[1]
    highest = np.maximum.accumulate(positions.max(axis=0))
    cursor = np.concatenate([[0], highest[:-1] + 1])  # the position that a text token would have
    is_fresh = (positions == cursor).all(axis=0)  # starts a text token or an image
    is_image = np.zeros(num_tokens, bool)
    is_image[places] = True
    after_text = np.concatenate([[True], ~is_image[:-1]])
    wrong = np.flatnonzero(~is_fresh & (~is_image | after_text))
    if len(wrong):
        place = wrong[0]
        kind = "the first row of an image" if is_image[place] else "text"
        _refuse(
            "positions",
            f"at {place} must be {cursor[place]} on every axis ({kind}), got {positions[:, place].tolist()}",
        )
    starts = np.flatnonzero(is_image & is_fresh)
    ends = np.flatnonzero(is_fresh | ~is_image)
    following = np.searchsorted(ends, starts, side="right")
    stops = np.append(ends, num_tokens)[following]
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        inside = positions[:, start:stop] - positions[0, start]
        if inside.min() < 0 or inside.max() >= stop - start:
            _refuse("positions", f"of the image at {start}..{stop - 1} must lie within {stop - start} from its first")
    return starts.tolist(), stops.tolist()


def _span(
    start: int,
    stop: int,
    places: NDArray[np.int64],
    rows: NDArray[np.float32],
    positions: NDArray[np.int64],
    sections: tuple[int, int, int] | None,
) -> ImageSpan:
    first, last = np.searchsorted(places, (start, stop))
    inside = positions[:, start:stop] - positions[0, start]
    name = digest("image rows", rows.shape[1], rows[first:last].tobytes(), inside.tobytes(), *(sections or ()))
    return ImageSpan(start, stop, name)


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array
