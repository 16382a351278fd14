"""Images in the step.

Owns: which rows of the step get an image's row instead of an embedding; rotary positions of sequences with images.
Must not know: why a sequence has the features it has (the gate does).
Invariant: what a token gets depends on its place in its own sequence only, so any cut into chunks, a cached prefix, and
recomputation after preemption all give the same.
"""

from collections.abc import Sequence as Many

import numpy as np
import torch

from izh.batch import Batch, BothWays, Overrides
from izh.model.rope import Rotary
from izh.multimodal.features import Features
from izh.multimodal.gate import ImageGate
from izh.seams import Stage
from izh.sequence import Chunk, Plan


class ImageStage(Stage):
    """The Stage (izh/seams.py) of images. `rotaries` are the decoder's."""

    def __init__(self, gate: ImageGate, rotaries: Many[Rotary]) -> None:
        self._gate = gate
        self._rotaries = rotaries

    def sync(self, plan: Plan) -> None:
        """Tell the decoder the sections, once they are settled."""
        mrope = self._gate.mrope
        for rotary in self._rotaries:
            if mrope is not None and rotary.mrope != mrope:
                rotary.set_mrope(mrope)

    def fill(self, plan: Plan, batch: Batch) -> None:
        """Write `batch.overrides`, `batch.both_ways` and `batch.positions`.

        The positions get three axes only when some row's coordinates differ, that is, when the step computes part of an
        image; else one axis says the same with the same numbers.
        """
        if not self._gate.num_live:
            return
        spans: list[tuple[slice, np.ndarray]] = []  # rows of the step, and their coordinates [3, n]
        places: list[np.ndarray] = []  # rows of the step that an image's row replaces
        values: list[np.ndarray] = []
        both_ways: list[BothWays] = []
        first = 0
        for index, chunk in enumerate(plan.chunks):
            features = self._gate.features(chunk.sequence)
            if features is not None:
                spans.append((slice(first, first + chunk.count), features.positions_of(chunk.start, chunk.stop)))
                inside, rows = features.rows_of(chunk.start, chunk.stop)
                places.append(inside - chunk.start + first)
                values.append(rows)
                if self._gate.both_ways:
                    both_ways += _whole(features, chunk, first, index)
            first += chunk.count
        if not spans:
            return
        device = batch.positions.device
        num_axes = 3 if any((own != own[0]).any() for _, own in spans) else 1
        positions = batch.positions.expand(num_axes, -1).clone()
        for where, own in spans:
            positions[:, where] = torch.from_numpy(own[:num_axes]).to(device)
        batch.positions = positions
        batch.both_ways = tuple(both_ways)
        if any(len(each) for each in places):
            batch.overrides = Overrides(
                torch.from_numpy(np.concatenate(places)).to(device), torch.from_numpy(np.concatenate(values)).to(device)
            )


def _whole(features: Features, chunk: Chunk, first: int, index: int) -> list[BothWays]:
    """The images that end in the chunk, or what of them a cached prefix leaves to compute; `first` is the
    chunk's first row in the step, `index` its sequence's."""
    out = []
    for span in features.spans:
        start = max(span.start, chunk.start)
        if start < span.stop <= chunk.stop:
            out.append(BothWays(start - chunk.start + first, span.stop - chunk.start + first, index, span.stop))
    return out
