"""Images of many requests become rows, beside the event loop.

Owns: ImageIntake: threads that decode and prepare, one that encodes whatever waits in one batch, the cache of rows,
what images that were sent before came to, and the bound on how many images are in work.
Must not know: HTTP, where bytes come from, prompts.
Invariant: every image asked for gives its rows or an error, also when whoever asked is gone; equal images in work at
the same time are encoded once. An image's identity is that of its pixels, `Prepared.digest`; the digest of what was
sent only finds it without decoding, within one intake, so for one encoder and one way to prepare.

    sent before, rows in the cache? ----------------------------------------------------------------> rows
    else -> [threads] decode, prepare -> cache? -> waiting -> [one thread] encode a batch -> cache -> rows
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence as Many
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from izh.cache.keys import digest
from izh.errors import EngineDeadError, OverloadedError
from izh.multimodal.decode import MAX_IMAGE_PIXELS, decode_image
from izh.multimodal.encoder_cache import CacheCounts, EncoderCache
from izh.multimodal.seam import MultimodalProcessor, Prepared

MAX_BATCH = 16  # images encoded in one call
MAX_IN_WORK = 64  # images between their arrival and their rows
MAX_KNOWN = 1024  # images sent of which it is remembered what they came to


@dataclass(frozen=True, eq=False, slots=True)
class ImageData:
    """An image as it was sent. `media_type` is what its sender calls it, if anything; `param` names it in errors."""

    data: bytes
    media_type: str | None
    param: str


@dataclass(frozen=True, eq=False, slots=True)
class TakenIn:
    """An image read. `prepared` is whole, or, when the rows are known already, `Prepared.laid_out`."""

    prepared: Any
    rows: Tensor | None = None


class ImageIntake:
    """`cache` may be shared by several; `num_threads` is for each encoding: the engine needs the cores more."""

    def __init__(
        self,
        processor: MultimodalProcessor,
        cache: EncoderCache,
        *,
        max_pixels: int = MAX_IMAGE_PIXELS,
        max_in_work: int = MAX_IN_WORK,
        num_threads: int = 1,
    ) -> None:
        self.processor = processor
        self._cache = cache
        self._max_pixels = max_pixels
        self._max_in_work = max_in_work
        self._num_in_work = 0  # of the event loop
        self._decoding = ThreadPoolExecutor(2, "izh-decode", torch.set_num_threads, (num_threads,))
        self._encoding = ThreadPoolExecutor(1, "izh-encode", torch.set_num_threads, (num_threads,))
        self._waiting: dict[bytes, tuple[Any, Future[Tensor]]] = {}  # prepared, not yet taken to be encoded
        self._taken: dict[bytes, Future[Tensor]] = {}  # being encoded
        self._known: OrderedDict[bytes, Prepared] = OrderedDict()  # laid out, by what was sent; least recently first
        self._lock = threading.Lock()

    @property
    def counts(self) -> CacheCounts:
        return self._cache.counts

    async def prepare(self, images: Many[ImageData]) -> list[TakenIn]:
        """The images of one prompt. Raises RequestError; OverloadedError when too many are in work."""
        with _Room(self, len(images)):
            return await asyncio.get_running_loop().run_in_executor(self._decoding, self._prepare, images)

    async def encode(self, images: Many[TakenIn]) -> list[Tensor]:
        """Rows of each image. They are shared: nobody may write into them."""
        missing = [each for each in images if each.rows is None]
        with _Room(self, len(missing)):
            futures = [self._rows(each.prepared) for each in missing]
            found = iter(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        return [next(found) if each.rows is None else each.rows for each in images]

    def close(self) -> None:
        """End the threads, once what they are at is done. What waits ends with EngineDeadError."""
        with self._lock:
            batch, self._waiting = self._waiting, {}
        for pool in (self._decoding, self._encoding):
            pool.shutdown(wait=False, cancel_futures=True)
        for _, future in batch.values():
            future.set_exception(EngineDeadError("the server is shut down"))

    def _prepare(self, images: Many[ImageData]) -> list[TakenIn]:
        is_only = len(images) == 1
        names = [digest("sent image", int(is_only), each.media_type or "", each.data) for each in images]
        taken = [self._remembered(name) for name in names]
        missing = [index for index, each in enumerate(taken) if each is None]
        decoded = [
            decode_image(each.data, each.media_type, each.param, self._max_pixels)[0]
            for each in (images[index] for index in missing)
        ]
        if not is_only and len(decoded) == 1:
            decoded *= 2  # one of several must not look like an only one
        for index, prepared in zip(missing, self.processor.prepare(decoded) if decoded else (), strict=False):
            taken[index] = TakenIn(prepared)
            self._remember(names[index], prepared)
        return [each for each in taken if each is not None]

    def _remembered(self, name: bytes) -> TakenIn | None:
        with self._lock:
            known = self._known.get(name)
            if known is None:
                return None
            self._known.move_to_end(name)
        rows = self._cache.find(known.digest)
        return None if rows is None else TakenIn(known, rows)

    def _remember(self, name: bytes, prepared: Any) -> None:
        with self._lock:
            self._known[name] = prepared.laid_out
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def _rows(self, prepared: Any) -> Future[Tensor]:
        """The rows, once they are there; whoever cancels this leaves them to others."""
        key = prepared.digest
        own: Future[Tensor] = Future()
        with self._lock:
            shared = self._taken.get(key) or (self._waiting[key][1] if key in self._waiting else None)
            if shared is None and (found := self._cache.get(key)) is not None:
                own.set_result(found)
                return own
            if shared is None:
                shared = Future()
                self._waiting[key] = prepared, shared
                self._encoding.submit(self._encode_waiting)
        shared.add_done_callback(lambda done: _copy(done, own))
        return own

    def _encode_waiting(self) -> None:
        """Encode what waits, in one batch: it may be more than one image, and nothing, when an earlier call took it."""
        with self._lock:
            keys = list(self._waiting)[:MAX_BATCH]
            batch = {key: self._waiting.pop(key) for key in keys}
            self._taken.update((key, future) for key, (_, future) in batch.items())
        if not batch:
            return
        try:
            rows = self.processor.encode([prepared for prepared, _ in batch.values()])
            for key, own in zip(batch, rows, strict=True):
                self._cache.put(key, own)
        except Exception as error:  # the encoder is not ours: whatever it raises belongs to those who wait for it
            self._conclude(batch, error=error)
        else:
            self._conclude(batch, rows)

    def _conclude(
        self, batch: dict[bytes, tuple[Any, Future[Tensor]]], rows: Many[Tensor] = (), error: Exception | None = None
    ) -> None:
        with self._lock:
            for key in batch:
                del self._taken[key]
        for index, (_, future) in enumerate(batch.values()):
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(rows[index])


@dataclass(slots=True)
class _Room:
    """Holds places for images in work. Raises OverloadedError when there are not as many; a prompt with more images
    than there are places at all is let in when nothing else is in work."""

    intake: ImageIntake
    num_images: int

    def __enter__(self) -> None:
        in_work = self.intake._num_in_work
        if in_work and in_work + self.num_images > self.intake._max_in_work:
            raise OverloadedError(f"{in_work} images are being read, as many as this server takes; try again shortly")
        self.intake._num_in_work += self.num_images

    def __exit__(self, *_error: object) -> None:
        self.intake._num_in_work -= self.num_images


def _copy(done: Future[Tensor], own: Future[Tensor]) -> None:
    if not own.set_running_or_notify_cancel():
        return
    error = done.exception()
    if error is not None:
        own.set_exception(error)
    else:
        own.set_result(done.result())
