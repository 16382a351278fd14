"""The processor: right pixels for every kind of image, a clear refusal for everything else, whatever the bytes."""

import base64
import io
import random
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from izh.errors import RequestError
from izh.multimodal import VisionConfig, VisionProcessor
from izh.multimodal.decode import MEDIA_TYPES

SIZE = 8
CONFIG = VisionConfig(SIZE, 4, 8, 2, 1, 8)
MIME = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif", "BMP": "image/bmp"}
EXACT = {"WEBP": {"lossless": True, "exact": True}}


def processor(**limits):
    return VisionProcessor(CONFIG, **limits)


def uri(data, mime="image/png"):
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def encoded(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **(EXACT.get(kind, {}) | options))
    return out.getvalue()


def process(image, kind="PNG", **options):
    return processor()(uri(encoded(image, kind, **options), MIME.get(kind, "image/jpeg")))


def colors(prepared):
    """The pixels back as 0..255, [S, S, 3]."""
    return ((prepared.pixels.permute(1, 2, 0) + 1) * 127.5).round().numpy().astype(int)


def quarters(top_left, top_right, bottom_left, bottom_right, mode="RGB"):
    """An image of the processor's own size in four flat colors, so that nothing is interpolated."""
    image = Image.new(mode, (SIZE, SIZE))
    half = SIZE // 2
    for color, corner in zip(
        (top_left, top_right, bottom_left, bottom_right), ((0, 0), (half, 0), (0, half), (half, half)), strict=True
    ):
        image.paste(color, (*corner, corner[0] + half, corner[1] + half))
    return image


def corners(prepared):
    array = colors(prepared)
    return [tuple(array[y, x].tolist()) for y in (1, -2) for x in (1, -2)]


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width, height, depth, color_type, row, *extra):
    """A PNG whose rows are all `row`, with chunks Pillow does not write."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress((b"\0" + row) * height))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + data + chunk(b"IEND", b"")


RGBW = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP"])
def test_colors_come_through_lossless_formats_exactly(kind):
    prepared = process(quarters(*RGBW), kind)
    assert corners(prepared) == RGBW
    assert prepared.pixels.shape == (3, SIZE, SIZE)
    assert prepared.pixels.dtype == torch.float32
    assert prepared.pixels.is_contiguous()
    assert prepared.pixels.device.type == "cpu"
    assert not prepared.pixels.requires_grad
    assert prepared.pixels.min() == -1.0
    assert prepared.pixels.max() == 1.0
    assert (prepared.width, prepared.height) == (SIZE, SIZE)


@pytest.mark.parametrize(("kind", "mode"), [("JPEG", "RGB"), ("JPEG", "CMYK"), ("JPEG", "L"), ("MPO", "RGB")])
def test_jpeg_in_every_mode_comes_close(kind, mode):
    image = quarters((255, 0, 0), (0, 0, 0), (128, 128, 128), (255, 255, 255)).convert(mode)
    options = {"save_all": True, "append_images": [Image.new("RGB", image.size)]} if kind == "MPO" else {}
    prepared = process(image, kind, quality=100, subsampling=0, **options)
    assert np.abs(colors(prepared) - np.asarray(image.convert("RGB")).astype(int)).max() <= 3


def test_a_palette_is_looked_up():
    image = quarters(*RGBW).convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    assert corners(process(image)) == RGBW
    other = image.copy()
    other.putpalette([0, 0, 0] * 256)
    assert process(other).digest != process(image).digest


def test_gray_and_one_bit():
    assert corners(process(quarters(0, 80, 160, 255, "L"))) == [(v, v, v) for v in (0, 80, 160, 255)]
    assert corners(process(quarters(0, 1, 1, 0, "1"))) == [(v, v, v) for v in (0, 255, 255, 0)]


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparency_is_laid_on_white(kind):
    image = quarters((255, 0, 0, 255), (255, 0, 0, 0), (0, 0, 0, 128), (0, 0, 255, 255), "RGBA")
    seen = corners(process(image, kind))
    assert seen == [(255, 0, 0), (255, 255, 255), (127, 127, 127), (0, 0, 255)]


def test_transparency_of_gray_and_of_a_palette_entry():
    assert corners(process(quarters((0, 255), (0, 0), (90, 255), (90, 0), "LA"))) == [
        (v, v, v) for v in (0, 255, 90, 255)
    ]
    image = quarters(*RGBW).convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    green = image.getpixel((SIZE - 2, 1))
    for kind in ("PNG", "GIF"):
        assert corners(process(image, kind, transparency=green))[1] == (255, 255, 255)


@pytest.mark.parametrize(
    ("depth", "color_type", "row", "key", "expected"),
    [
        (16, 0, struct.pack(">2H", 0, 65535), None, [0, 255]),
        (16, 0, struct.pack(">2H", 0x8080, 0x1234), None, [128, 18]),
        (16, 0, struct.pack(">2H", 0x8080, 0x1234), struct.pack(">H", 0x1234), [128, 255]),
        (8, 0, b"\x80\x20", struct.pack(">H", 0x20), [128, 255]),
        (4, 0, b"\x5a", struct.pack(">H", 5), [255, 170]),
        (2, 0, b"\x60", struct.pack(">H", 1), [255, 170]),
        (1, 0, b"\x40", struct.pack(">H", 0), [255, 255]),
        (16, 2, struct.pack(">6H", *[0x8080] * 3, *[65535] * 3), None, [128, 255]),
        (8, 2, bytes([9, 9, 9, 70, 70, 70]), struct.pack(">3H", 9, 9, 9), [255, 70]),
        (16, 4, struct.pack(">4H", 0, 65535, 0, 0), None, [0, 255]),
    ],
)
def test_png_depths_and_transparent_colors(depth, color_type, row, key, expected):
    extra = [] if key is None else [chunk(b"tRNS", key)]
    # Two pixels side by side, stretched: the outermost columns are nearly the pixels themselves.
    prepared = VisionProcessor(VisionConfig(2, 2, 8, 2, 1, 8))(uri(png(2, 2, depth, color_type, row, *extra)))
    assert colors(prepared)[0].tolist() == [[v] * 3 for v in expected]


def test_a_transparent_color_of_16_bits_is_refused_not_guessed():
    data = png(
        2, 1, 16, 2, struct.pack(">6H", *[0x8081] * 3, *[0x8080] * 3), chunk(b"tRNS", struct.pack(">3H", *[0x8080] * 3))
    )
    with pytest.raises(RequestError, match="16 bits per channel together with a transparent color"):
        processor()(uri(data))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_exif_orientation_is_applied(orientation, kind):
    """How a reader must turn the stored image, from the EXIF standard: (first row is, first column is)."""
    upright = quarters(*RGBW)
    stored = {
        1: lambda i: i,
        2: lambda i: i.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: lambda i: i.rotate(180),
        4: lambda i: i.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: lambda i: i.transpose(Image.Transpose.TRANSPOSE),
        6: lambda i: i.rotate(90),  # shown by turning it 90 degrees clockwise
        7: lambda i: i.transpose(Image.Transpose.TRANSVERSE),
        8: lambda i: i.rotate(-90),
    }[orientation](upright)
    exif = Image.Exif()
    exif[0x0112] = orientation
    prepared = process(stored, kind, exif=exif)
    assert corners(prepared) == RGBW
    assert prepared.digest == process(upright, kind).digest


def test_a_rotated_photo_reports_its_upright_size():
    exif = Image.Exif()
    exif[0x0112] = 6
    prepared = process(Image.new("RGB", (40, 20)), "JPEG", exif=exif)
    assert (prepared.width, prepared.height) == (20, 40)


def test_resizing_averages_over_what_it_shrinks():
    checkers = Image.fromarray((np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8))
    assert np.abs(colors(process(checkers)) - 127.5).max() < 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("https://example.com/a.png", "fetches no URLs"),
        ("file:///etc/hostname", "fetches no URLs"),
        ("", "fetches no URLs"),
        ("data:image/png,abc", "must have the form"),
        ("data:image/png;base64", "must have the form"),
        ("data:image/png;charset=utf-8;base64,AAAA", "must have the form"),
        ("data:image/svg+xml;base64,AAAA", r"'image/svg\+xml'; supported: image/png"),
        ("data:;base64,AAAA", "media type ''"),
        ("data:image/png;base64,AA*A", "not valid base64"),
        ("data:image/png;base64,AAA", "not valid base64"),
        ("data:image/png;base64,AAA\n", "not valid base64"),
        ("data:image/png;base64,ÄAAA", "not valid base64"),
        ("data:image/png;base64,", "not a readable PNG"),
        ("data:image/png;base64,AAAA", "not a readable PNG"),
    ],
)
def test_what_is_no_base64_image_is_refused(text, says):
    with pytest.raises(RequestError, match=says) as caught:
        processor()(text, "messages[0].content[1].image_url.url")
    assert caught.value.param == "messages[0].content[1].image_url.url"
    assert len(caught.value.message) < 300


def test_case_and_spaces_of_the_header_do_not_matter():
    plain = uri(encoded(quarters(*RGBW)))
    assert (
        processor()(plain.replace("data:image/png;base64", "DATA:Image/PNG; Base64")).digest
        == processor()(plain).digest
    )


@pytest.mark.parametrize("kind", MIME)
@pytest.mark.parametrize("declared", MIME)
def test_a_wrong_media_type_is_refused_by_name(kind, declared):
    text = uri(encoded(quarters(*RGBW), kind), MIME[declared])
    if kind == declared:
        processor()(text)
        return
    with pytest.raises(RequestError, match=f"says {MIME[declared]}, but its bytes are {kind}"):
        processor()(text)


def test_other_formats_are_not_even_opened():
    for kind in ("TIFF", "PPM", "ICO"):
        with pytest.raises(RequestError, match="not a readable PNG"):
            processor()(uri(encoded(quarters(*RGBW), kind)))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations_are_refused_and_single_frames_are_not(kind):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    with pytest.raises(RequestError, match="is animated"):
        process(frames[0], kind, save_all=True, append_images=frames[1:])
    assert corners(process(frames[0], kind, save_all=True))[0] == (255, 0, 0)


@pytest.mark.parametrize("kind", MIME)
def test_every_truncation_gives_the_whole_image_or_an_error(kind):
    noise = np.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    whole = processor()(uri(data, MIME[kind]))
    num_refused = 0
    for cut in range(1, len(data), 7):
        try:
            prepared = processor()(uri(data[:cut], MIME[kind]))
        except RequestError:
            num_refused += 1
        else:
            assert torch.equal(prepared.pixels, whole.pixels)
    assert num_refused > len(data) // 7 * 0.95


@pytest.mark.parametrize("kind", MIME)
def test_damaged_bytes_never_raise_anything_else(kind):
    rng = random.Random(kind)
    data = encoded(quarters(*RGBW).resize((20, 20)), kind)
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            prepared = processor(max_image_pixels=100_000)(uri(bytes(damaged), MIME[kind]))
        except RequestError:
            continue
        assert torch.isfinite(prepared.pixels).all()


def test_bytes_are_bounded_before_base64_is_decoded():
    data = encoded(quarters(*RGBW))
    processor(max_image_bytes=len(data))(uri(data))
    with pytest.raises(RequestError, match=rf"has {len(data)} bytes of image, at most {len(data) - 1}"):
        processor(max_image_bytes=len(data) - 1)(uri(data))
    with pytest.raises(RequestError, match="at most 300 are allowed"):
        processor(max_image_bytes=300)("data:image/png;base64," + "*" * 404)  # not even looked at


def test_pixels_are_bounded_by_the_header():
    image = Image.new("L", (50, 20))
    processor(max_image_pixels=1000)(uri(encoded(image)))
    with pytest.raises(RequestError, match="is 50x20 = 1000 pixels, at most 999"):
        processor(max_image_pixels=999)(uri(encoded(image)))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("width", "height"), [(8000, 8000), (12_000, 12_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)]
)
def test_a_bomb_is_refused_without_decoding_it(width, height):
    """The header claims what the data does not hold: were it decoded, the error would be another."""
    with pytest.raises(RequestError, match=r"at most 36000000( pixels)? are allowed"):
        processor()(uri(png_claiming(width, height)))


def png_claiming(width, height):
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(64))) + chunk(b"IEND", b"")


def test_a_text_chunk_bomb_is_refused():
    bomb = chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(80 * 2**20)))
    with pytest.raises(RequestError, match="cannot be decoded"):
        processor()(uri(png(1, 1, 8, 0, b"\0", bomb)))


def test_the_digest_names_the_decoded_image_and_its_preparation():
    image = quarters(*RGBW)
    base = process(image).digest
    assert len(base) == 32
    assert process(image, compress_level=1).digest == base, "other bytes, the same pixels"
    moved = image.copy()
    moved.putpixel((3, 3), (1, 2, 3))
    wide = Image.new("RGB", (16, 4), "red")
    others = [
        process(moved).digest,
        process(image.convert("RGBA")).digest,
        VisionProcessor(VisionConfig(16, 4, 8, 2, 1, 8))(uri(encoded(image))).digest,
        process(wide).digest,
        process(Image.new("RGB", (4, 16), "red")).digest,
    ]
    assert len({base, *others}) == 6


def test_every_format_has_a_media_type():
    assert set(MEDIA_TYPES.values()) == set(MIME)
