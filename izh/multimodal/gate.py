"""Admission of requests with images, and what their cached blocks are called.

Owns: the Features of every live sequence; the model's M-RoPE sections, once they are settled.
Must not know: tensors, encoders, how features travel (it is given a function that finds a sequence's).
Invariant: a sequence's Features never change, so any chunk of it can be computed again from the same rows.
"""

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from izh.errors import RequestError
from izh.model.rope import Mrope
from izh.model.spec import RopeSpec
from izh.multimodal.features import Features
from izh.seams import Gate
from izh.sequence import Chunk, Sequence


class ImageGate(Gate):
    """The Gate (izh/seams.py) of images.

    `features_of` gives a sequence's validated Features once they are, or the RequestError that they came to; None for
    a prompt without images.
    `ropes` are the model's rotary recipes; `mrope` is its own M-RoPE, if its checkpoint has one. Without, the first
    request with images settles the sections: then none of the recipes may be scaled, as nothing says how both combine.

    `max_whole` is for a model in which an image's rows see each other both ways: an image is then computed in one step,
    so it may have at most that many rows. It must be so small that a step has room for them whoever else runs.
    """

    def __init__(
        self,
        features_of: Callable[[Sequence], Future[Features] | None],
        ropes: tuple[RopeSpec, ...],
        mrope: Mrope | None = None,
        max_whole: int | None = None,
    ) -> None:
        self.mrope = mrope
        self._max_whole = max_whole
        self._features_of = features_of
        self._ropes = ropes
        self._checking: dict[str, Future[Features]] = {}  # of sequences that are not open yet
        self._features: dict[str, Features] = {}

    def prepare(self, sequence: Sequence) -> Future[Features] | None:
        checked = self._features_of(sequence)
        if checked is None:
            return None
        self._checking[sequence.id] = checked
        return None if checked.done() else checked

    def open(self, sequence: Sequence) -> None:
        checked = self._checking.pop(sequence.id, None)
        if checked is None:
            return
        features = checked.result()
        if features.num_tokens != sequence.num_tokens:
            raise RequestError(
                f"features.positions are for {features.num_tokens} tokens, the prompt has {sequence.num_tokens}",
                "features.positions",
            )
        self._settle(features.sections)
        self._check_whole(features)
        self._features[sequence.id] = features

    def key(self, sequence: Sequence, start: int, stop: int) -> tuple[bytes, ...]:
        """What a block's KV depends on besides its tokens and the blocks before it (which the chain of keys names).

        Three things, each named by value:
        - the rows put in place of embeddings within the block. A row is named by its image's digest and by where that
          image starts, counted from the block's start (negative when it began in an earlier block);
        - the rotary positions of the block's tokens: cached keys are already turned by them. They are named where they
          differ from the tokens' places, as what is added to those. Text before the first image is not displaced; what
          comes after an image of n rows is, generated tokens too, unless one side of its grid is n itself;
        - the sections: they matter only where three coordinates differ, which is in images, whose digests have them.

        So blocks before the first image give () and are shared with plain text; the first block an image touches has
        another key, and by the chain every later one has. In later blocks, naming positions repeats what the chain
        implies for prompts as `validate_features` admits them; being named, they stay right whatever it comes to admit.
        The digest of an image does not depend on what follows it, as delta does: a conversation that adds a second
        image finds the blocks of the first.
        """
        features = self._features.get(sequence.id)
        if features is None or not features.spans or stop <= features.spans[0].start:
            return ()
        parts: list[bytes] = []
        for span in features.spans:
            if span.start < stop and start < span.stop:
                parts += (b"image", span.digest, b"%d" % (span.start - start))
        displaced = features.positions_of(start, stop) - np.arange(start, stop)
        if displaced.any():
            parts += (b"positions", displaced.tobytes())
        return tuple(parts)

    def grant(self, chunk: Chunk) -> int:
        """All, or as many as end before an image that must be whole and is not; 0 when that image is the next."""
        if self._max_whole is not None and (features := self._features.get(chunk.sequence.id)) is not None:
            for span in features.spans:
                if span.start < chunk.stop < span.stop:
                    return max(0, span.start - chunk.start)
        return chunk.count

    def close(self, sequence: Sequence) -> None:
        self._checking.pop(sequence.id, None)
        self._features.pop(sequence.id, None)

    # -- what the stage asks ------------------------------------------------------------------------------------------

    def features(self, sequence: Sequence) -> Features | None:
        """The sequence's images; None if it has none."""
        return self._features.get(sequence.id)

    @property
    def both_ways(self) -> bool:
        """Whether an image's rows see each other, not only those before."""
        return self._max_whole is not None

    @property
    def num_live(self) -> int:
        """Live sequences with images."""
        return len(self._features)

    def _check_whole(self, features: Features) -> None:
        most = max((span.stop - span.start for span in features.spans), default=0)
        if self._max_whole is not None and most > self._max_whole:
            raise RequestError(
                f"an image has {most} rows side by side, which this model computes in one step; a step has room for "
                f"{self._max_whole} (max_num_batched_tokens less max_num_seqs)",
                "features.image_rows",
            )

    def _settle(self, sections: tuple[int, int, int] | None) -> None:
        if self.mrope is not None:
            if sections != self.mrope.sections:
                raise RequestError(
                    f"features.sections are {sections}; this model's are {self.mrope.sections}", "features.sections"
                )
            return
        if sections is None:
            return
        mrope = Mrope(sections)
        for rope in self._ropes:
            if rope.type != "default":
                raise RequestError(
                    f"this model scales its rotary frequencies ({rope.type}) and does not say how that combines with "
                    "the three position axes of images",
                    "features.sections",
                )
            try:
                mrope.axes(rope.rotary_dim)
            except ValueError as error:
                raise RequestError(f"features.{error}", "features.sections") from error
        self.mrope = mrope
