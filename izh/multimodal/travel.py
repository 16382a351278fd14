"""A prompt's features on their way from the process that encodes images to the one that computes.

Owns: `pack`, the form in which they cross the process queue, and Arrivals, which checks them on the other side.
Must not know: queues, encoders. What is true of features is checked in one place, `izh/multimodal/features.py`.
Invariants: the choices of a user request, which share one PackedFeatures, share one Features. Megabytes are read and
hashed in a thread of their own, so that no step waits for them.
"""

import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from izh.errors import RequestError
from izh.multimodal.features import Features, check_fields, validate_features
from izh.request import PackedFeatures
from izh.sequence import Sequence


def pack(features: Mapping[str, Any]) -> PackedFeatures:
    """What `VisionPrompt.features` gives, as bytes.

    Raises RequestError for what has no such form; whether it is right for a prompt and a model is found on arrival.
    """
    check_fields(features)
    image_rows, delta, sections = features["image_rows"], features["delta"], features["sections"]
    if not isinstance(image_rows, Mapping) or not all(map(_is_int, image_rows)):
        raise RequestError("features.image_rows must map positions to rows", "features.image_rows")
    if not _is_int(delta):
        raise RequestError(f"features.delta must be an integer, got {delta!r}", "features.delta")
    if sections is not None:
        if not isinstance(sections, list | tuple) or len(sections) != 3 or not all(map(_is_int, sections)):
            raise RequestError(f"features.sections must be three integers, got {sections!r}", "features.sections")
        sections = int(sections[0]), int(sections[1]), int(sections[2])
    places = np.array(sorted(image_rows), "<i8")
    rows = _stacked([image_rows[place] for place in places.tolist()])
    return PackedFeatures(
        width=rows.shape[1],
        rows=rows.tobytes(),
        places=places.tobytes(),
        positions=_coordinates(features["positions"]).tobytes(),
        delta=int(delta),
        sections=sections,
    )


class Arrivals:
    """Finds the Features of a sequence (see ImageGate) in its request. Each PackedFeatures is checked once: its choices
    arrive one after another. Nothing is kept of what nobody waits for."""

    def __init__(self, hidden_size: int, rotary_dim: int, dtype: torch.dtype) -> None:
        self._hidden_size = hidden_size
        self._rotary_dim = rotary_dim
        self._dtype = dtype
        self._worker = ThreadPoolExecutor(1, "izh-features")
        self._last: tuple[weakref.ref[PackedFeatures], weakref.ref[Future[Features]]] | None = None

    def features_of(self, sequence: Sequence) -> Future[Features] | None:
        """None for a request without features; ends with RequestError for features that are not right."""
        packed = sequence.request.features
        if packed is None:
            return None
        if self._last is not None and self._last[0]() is packed and (known := self._last[1]()) is not None:
            return known
        checked = self._worker.submit(
            validate_features,
            packed,
            num_tokens=sequence.num_tokens,
            hidden_size=self._hidden_size,
            rotary_dim=self._rotary_dim,
            dtype=self._dtype,
        )
        self._last = weakref.ref(packed), weakref.ref(checked)
        return checked


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _stacked(rows: list[Any]) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """[R, D] float32."""
    tensors = [torch.from_numpy(row) if isinstance(row, np.ndarray) else row for row in rows]
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.dim() != 1 or not tensor.is_floating_point():
            got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise RequestError(f"features.image_rows must be rows of floating point, got {got}", "features.image_rows")
        if len(tensor) != len(tensors[0]):
            raise RequestError(
                f"features.image_rows must be of one width, got {len(tensors[0])} and {len(tensor)}",
                "features.image_rows",
            )
    if not tensors:
        return np.empty((0, 0), "<f4")
    return torch.stack([tensor.detach().cpu().float() for tensor in tensors]).numpy().astype("<f4", copy=False)


def _coordinates(value: Any) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """[3, T] int64."""
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim != 2 or len(array) != 3:
        got = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(value).__name__
        raise RequestError(f"features.positions must be integers [3, T], got {got}", "features.positions")
    return array.astype("<i8")
