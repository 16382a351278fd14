"""Many requests' images at once: batched, shared, bounded, and each with rows of its own."""

import asyncio
import threading
from dataclasses import dataclass, replace

import pytest
import torch
from PIL import Image
from seeing import encoder, picture, uri

from izh.errors import EngineDeadError, OverloadedError, RequestError
from izh.multimodal import VisionProcessor
from izh.multimodal import intake as module
from izh.multimodal.decode import read_data_uri
from izh.multimodal.encoder_cache import EncoderCache
from izh.multimodal.intake import MAX_BATCH, ImageData, ImageIntake

MANY = 10**6


@dataclass
class Seen:
    """`pixels` are what only the encoder takes."""

    digest: bytes
    value: int
    pixels: str | None = "there"

    @property
    def laid_out(self):
        return replace(self, pixels=None)


class Eyes:
    """Rows say what was seen. It waits where a test tells it to, and remembers its batches."""

    def __init__(self):
        self.batches: list[list[int]] = []
        self.may_encode = threading.Event()
        self.may_encode.set()
        self.fails = False
        self.prepared: list[int] = []  # images in each call

    def prepare(self, images):
        self.prepared.append(len(images))
        values = [image.getpixel((0, 0))[0] for image in images]
        return [Seen(bytes([value]), value) for value in values]

    def encode(self, images):
        assert self.may_encode.wait(10)
        assert all(image.pixels for image in images)
        self.batches.append([image.value for image in images])
        if self.fails:
            raise RuntimeError("no light")
        return [torch.full((2, 3), float(image.value)) for image in images]

    def lay_out(self, messages, images, **template):
        raise AssertionError("not asked here")


def sent(value, param="image", form="PNG"):
    return ImageData(*reversed(read_data_uri(uri(Image.new("RGB", (2, 2), (value, 0, 0)), form), param)), param)


def intake(eyes, cache_bytes=MANY, **options):
    made = ImageIntake(eyes, EncoderCache(cache_bytes), **options)
    return made


async def read(made, *values):
    rows = await made.encode(await made.prepare([sent(value) for value in values]))
    return [int(each[0, 0]) for each in rows]


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_rows_come_in_order_and_are_kept():
    eyes = Eyes()
    made = intake(eyes)
    assert await read(made, 3, 1, 2) == [3, 1, 2]
    assert await read(made, 2, 3) == [2, 3]
    assert sorted(value for batch in eyes.batches for value in batch) == [1, 2, 3]
    counts = made.counts
    assert (counts.hits, counts.misses, counts.num_bytes) == (2, 3, 3 * 24)
    made.close()


async def test_an_image_sent_again_is_not_even_decoded(monkeypatch):
    eyes = Eyes()
    made = intake(eyes)
    decoded = []
    decode = module.decode_image
    monkeypatch.setattr(module, "decode_image", lambda *args: decoded.append(args) or decode(*args))
    assert await read(made, 3) == [3]
    assert await read(made, 3) == await read(made, 3) == [3]
    assert (len(decoded), eyes.prepared, eyes.batches) == (1, [1], [[3]])
    counts = made.counts
    assert (counts.hits, counts.misses, counts.num_entries) == (2, 1, 1)
    made.close()


async def test_the_same_pixels_in_another_file_are_decoded_and_found():
    eyes = Eyes()
    made = intake(eyes)
    assert await read(made, 3) == [3]
    (taken,) = await made.prepare([sent(3, form="BMP")])
    assert taken.rows is None
    assert [int(rows[0, 0]) for rows in await made.encode([taken])] == [3]
    assert eyes.batches == [[3]]
    with pytest.raises(RequestError, match="says image/png, but its bytes are BMP"):  # known bytes, and still a lie
        await made.prepare([replace(sent(3, form="BMP"), media_type="image/png")])
    made.close()


async def test_rows_that_have_left_the_cache_are_encoded_again():
    eyes = Eyes()
    made = intake(eyes, cache_bytes=24)  # one image's
    assert await read(made, 1) == [1]
    assert await read(made, 2) == [2]
    assert await read(made, 1) == [1]
    assert eyes.batches == [[1], [2], [1]]
    (taken,) = await made.prepare([sent(1)])
    assert await read(made, 2) == [2]  # between the two halves of another's way
    assert [int(rows[0, 0]) for rows in await made.encode([taken])] == [1]
    assert (made.counts.hits, made.counts.misses) == (1, 4)
    made.close()


async def test_an_image_beside_others_is_not_what_it_is_alone():
    """And a new one of several is prepared in company, though the others are known."""
    eyes = Eyes()
    made = intake(eyes)
    assert await read(made, 1) == [1]
    assert await read(made, 1, 2) == [1, 2]
    assert await read(made, 1, 2, 3) == [1, 2, 3]
    assert await read(made, 2, 1) == [2, 1]
    assert eyes.prepared == [1, 2, 2]
    assert sorted(value for batch in eyes.batches for value in batch) == [1, 2, 3]
    made.close()


async def test_what_is_remembered_of_images_sent_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_KNOWN", 2)
    eyes = Eyes()
    made = intake(eyes)
    for value in (1, 2, 1, 3):
        assert await read(made, value) == [value]
    assert eyes.prepared == [1, 1, 1]
    assert await read(made, 1) == [1]  # used last before 3 came, so 2 has left
    assert eyes.prepared == [1, 1, 1]
    assert await read(made, 2) == [2]
    assert eyes.prepared == [1, 1, 1, 1]
    assert sorted(value for batch in eyes.batches for value in batch) == [1, 2, 3]
    assert len(made._known) == 2
    assert all(each.pixels is None for each in made._known.values())
    made.close()


async def test_what_waits_is_encoded_together_and_equal_images_once():
    eyes = Eyes()
    made = intake(eyes, cache_bytes=0)
    eyes.may_encode.clear()
    first = asyncio.create_task(read(made, 100))
    await until(lambda: made._taken)
    others = [asyncio.create_task(read(made, value, 100, value)) for value in range(20)]
    await until(lambda: len(made._waiting) == 20)
    eyes.may_encode.set()
    assert await first == [100]
    assert [await other for other in others] == [[value, 100, value] for value in range(20)]
    assert [len(batch) for batch in eyes.batches] == [1, MAX_BATCH, 20 - MAX_BATCH]
    assert not made._taken
    assert not made._waiting
    made.close()


async def test_whoever_leaves_takes_nothing_from_others():
    eyes = Eyes()
    made = intake(eyes)
    eyes.may_encode.clear()
    leaving, staying = asyncio.create_task(read(made, 5)), asyncio.create_task(read(made, 5))
    await until(lambda: made._taken)
    await asyncio.sleep(0.02)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    eyes.may_encode.set()
    assert await staying == [5]
    assert await read(made, 5) == [5]
    assert eyes.batches == [[5]]
    made.close()


async def test_an_error_is_each_of_its_batch_and_no_later_ones():
    eyes = Eyes()
    made = intake(eyes)
    eyes.fails = True
    results = await asyncio.gather(read(made, 1), read(made, 2), return_exceptions=True)
    assert [str(result) for result in results] == ["no light"] * 2
    eyes.fails = False
    assert await read(made, 1, 2) == [1, 2]
    with pytest.raises(RequestError, match="image is not a readable PNG image"):
        await made.prepare([sent(1), ImageData(b"x", "image/png", "image")])
    made.close()


async def test_images_in_work_are_bounded():
    eyes = Eyes()
    made = intake(eyes, max_in_work=3)
    eyes.may_encode.clear()
    held = asyncio.create_task(read(made, 1, 2))
    await until(lambda: made._taken)
    with pytest.raises(OverloadedError, match="2 images are being read"):
        await read(made, 3, 4)
    eyes.may_encode.set()
    assert await held == [1, 2]
    assert await read(made, 3, 4) == [3, 4]
    assert await read(made, *range(8)) == list(range(8)), "more than fit, and alone"
    made.close()


async def test_what_waits_at_the_end_is_told():
    eyes = Eyes()
    made = intake(eyes)
    eyes.may_encode.clear()
    running = asyncio.create_task(read(made, 1))
    await until(lambda: made._taken)
    waiting = asyncio.create_task(read(made, 2))
    await until(lambda: made._waiting)
    made.close()
    with pytest.raises(EngineDeadError):
        await waiting
    eyes.may_encode.set()
    assert await running == [1]


async def test_the_event_loop_goes_on_while_images_are_read():
    eyes = Eyes()
    made = intake(eyes)
    eyes.may_encode.clear()
    task = asyncio.create_task(read(made, 1))
    ticks = 0
    while ticks < 50:
        await asyncio.sleep(0.001)
        ticks += 1
    assert not task.done()
    eyes.may_encode.set()
    assert await task == [1]
    made.close()


def test_pictures_of_the_path_are_those_of_the_processor():
    processor = VisionProcessor(encoder().config)
    whole = processor(uri(picture(3)))
    assert torch.equal(processor.prepare(picture(3)).pixels, whole.pixels)
