"""What an image may cost, by option: refused by value and limit before anything is decoded."""

import io

import pytest
import seeing
import tiny_checkpoint
from PIL import Image, ImageFile
from seeing import image, picture, text, uri, user

from izh.config import ServerOptions
from izh.errors import OptionError, RequestError
from izh.multimodal.decode import PIXELS_BOUND, decode_image
from izh.server.images import Images

PARAM = "messages[0].content[1].image_url"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return seeing.path(tiny_checkpoint.save_llama(tmp_path_factory.mktemp("model") / "tiny"))


async def refused(path, url, **options):
    images = Images(path, ServerOptions(**options))
    try:
        with pytest.raises(RequestError) as caught:
            await images.prompt([user(text("x"), image(url))], 256)
    finally:
        images.close()
    assert caught.value.param == PARAM
    return caught.value.message


@pytest.fixture
def undecoded(monkeypatch):
    def load(self):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)


async def test_bytes_are_bounded_wherever_they_come_from(path, undecoded, tmp_path):
    url = uri(picture(1, (64, 64)), "BMP")
    num_bytes = 64 * 64 * 3 + 54
    message = await refused(path, url, max_image_mb=0.01)
    assert message == f"{PARAM} has {num_bytes} bytes of image, at most {int(0.01 * 2**20)} are allowed"
    file = tmp_path / "a.bmp"
    picture(1, (64, 64)).save(file)
    message = await refused(path, file.as_uri(), max_image_mb=0.01, image_root=str(tmp_path))
    assert f"more than the {int(0.01 * 2**20)} bytes" in message


async def test_pixels_are_bounded_by_the_header(path, undecoded):
    message = await refused(path, uri(picture(1, (40, 30))), max_image_pixels=1199)
    assert message == f"{PARAM} is 40x30 = 1200 pixels, at most 1199 are allowed"


async def test_what_is_within_the_limits_is_read(path):
    images = Images(path, ServerOptions(max_image_mb=0.02, max_image_pixels=4096))
    token_ids, features = await images.prompt([user(text("x"), image(uri(picture(1, (64, 64)), "BMP")))], 256)
    images.close()
    assert len(features["image_rows"]) == seeing.NUM_ROWS
    assert len(token_ids) > seeing.NUM_ROWS


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("max_image_mb", 0, "--max-image-mb must be above 0, got 0"),
        ("max_image_pixels", 0, f"--max-image-pixels must be within 1..{PIXELS_BOUND}"),
        ("max_image_pixels", PIXELS_BOUND + 1, f"--max-image-pixels must be within 1..{PIXELS_BOUND}"),
    ],
)
def test_impossible_limits_are_refused(path, option, value, says):
    with pytest.raises(OptionError, match=says):
        Images(path, ServerOptions(**{option: value}))


def test_the_decoders_own_bound_is_told_as_ours():
    out = io.BytesIO()
    Image.new("1", (1, 1)).save(out, "BMP")
    raw = bytearray(out.getvalue())
    raw[18:26] = (20_000).to_bytes(4, "little") * 2
    with pytest.raises(RequestError, match="image is 400000000 pixels, at most 36000000 are allowed"):
        decode_image(bytes(raw), None, "image")
