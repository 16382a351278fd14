"""Whatever is sent as an image is refused soon, within bounded memory, and the server goes on."""

import base64
import io
import struct
import time
import zlib

import httpx
import numpy as np
import psutil
import pytest
import seeing
import tiny_checkpoint
from PIL import Image
from seeing import image, picture, text, uri, user
from serving import serving

from izh.engine.async_llm import AsyncLLM

CHAT = "/v1/chat/completions"
LIMIT_S = 3.0
LIMIT_BYTES = 200 * 2**20


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    folder = tiny_checkpoint.save_llama(tmp_path_factory.mktemp("model") / "tiny")
    root = tmp_path_factory.mktemp("images")
    llm = AsyncLLM(model=str(folder), kv_cache_gb=0.02, num_threads=1)
    hosts = ("127.0.0.1", "2130706433", "localhost", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "0x7f.1")
    hosts += ("0177.0.0.1", "127.1", "0.0.0.0", "10.0.0.1", "[fe80::1]", "[64:ff9b::7f00:1]")
    with (
        serving(
            llm,
            multimodal_processor=seeing.path(folder),
            allow_image_hosts=hosts,
            image_root=str(root),
            max_images=4,
            image_cache_mb=0.01,
        ) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def data(raw, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"


def chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width, height, rows=b"", *more):
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), *more, chunk(b"IDAT", zlib.compress(rows, 9)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def saved(made, form, **options):
    out = io.BytesIO()
    made.save(out, form, **options)
    return out.getvalue()


PLAIN = saved(picture(1, (64, 64)), "PNG")
JPEG = saved(picture(1, (64, 64)), "JPEG")
JPEG_SIZE = struct.pack(">HH", 64, 64)  # in its header
FRAMES = [picture(i) for i in range(3)]
HOSTILE = {
    "a bomb of zeros": data(png(30000, 30000, bytes(1000))),
    "a real bomb": data(saved(Image.new("1", (12000, 12000)), "PNG")),
    "a huge header": data(png(2**31 - 1, 2**31 - 1)),
    "a width of nothing": data(png(0, 10)),
    "a text chunk that grows": data(png(8, 8, bytes(200), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8), 9)))),
    "a profile that grows": data(png(8, 8, bytes(200), chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(10**8), 9)))),
    "too few rows": data(png(64, 64, bytes(10))),
    "a cut png": data(PLAIN[: len(PLAIN) // 2]),
    "a cut jpeg": data(JPEG[: len(JPEG) // 2], "jpeg"),
    "a header alone": data(PLAIN[:33]),
    "a wrong checksum": data(PLAIN[:40] + bytes([PLAIN[40] ^ 255]) + PLAIN[41:]),
    "no bytes": data(b""),
    "noise": data(bytes(range(256)) * 40),
    "a jpeg that says png": data(JPEG),
    "a png that says jpeg": data(PLAIN, "jpeg"),
    "a gif that moves": data(saved(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "gif"),
    "a webp that moves": data(saved(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]), "webp"),
    "a png that moves": data(saved(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:])),
    "a jpeg of 65500 x 65500": data(JPEG.replace(JPEG_SIZE, struct.pack(">HH", 65500, 65500), 1), "jpeg"),
    "a tiff": data(saved(picture(1), "TIFF"), "tiff"),
    "a tiff that says png": data(saved(picture(1), "TIFF")),
    "svg": data(b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", "svg+xml"),
    "postscript": data(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n/x {(w) file} def\n"),
    "html": data(b"<html><script>1</script></html>"),
    "wrong base64": "data:image/png;base64,AA=A*",
    "no base64": "data:image/png,%89PNG",
    "no type": "data:;base64,AAAA",
    "a text": "data:text/plain;base64,AAAA",
    "17 MiB": data(bytes(17 * 2**20)),
    "http": "http://127.0.0.1/a.png",
    "loopback": "https://127.0.0.1/a.png",
    "loopback as a number": "https://2130706433/a.png",
    "loopback in hexadecimal": "https://0x7f.1/a.png",
    "loopback in octal": "https://0177.0.0.1/a.png",
    "loopback in short": "https://127.1/a.png",
    "loopback with a dot": "https://127.0.0.1./a.png",
    "loopback in wide digits": "https://\uff11\uff12\uff17.0.0.1/a.png",
    "any address": "https://0.0.0.0/a.png",
    "a private network": "https://10.0.0.1/a.png",
    "a link's own address": "https://[fe80::1]/a.png",
    "loopback behind a gateway": "https://[64:ff9b::7f00:1]/a.png",
    "loopback in v6": "https://[::1]/a.png",
    "loopback in v6 as v4": "https://[::ffff:127.0.0.1]/a.png",
    "loopback by name": "https://localhost:443/a.png",
    "the cloud's metadata": "https://169.254.169.254/latest/meta-data/",
    "a host that is not listed": "https://example.com/a.png",
    "a user before the host": "https://127.0.0.1@example.com/a.png",
    "a file elsewhere": "file:///etc/passwd",
    "a way out": "file:///../../../etc/passwd",
    "no scheme": "/etc/passwd",
    "nothing": "",
    "another scheme": "ftp://127.0.0.1/a.png",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_image_is_refused_soon_and_in_little_memory(http, name):
    process = psutil.Process()
    before = process.memory_info().rss
    start = time.monotonic()
    answer = http.post(CHAT, json={"messages": [user(text("x"), image(HOSTILE[name]))], "max_tokens": 2})
    assert time.monotonic() - start < LIMIT_S
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[1].image_url"
    assert error["message"].startswith(error["param"])
    assert len(error["message"]) < 500
    assert process.memory_info().rss - before < LIMIT_BYTES


def rotated():
    """Lies on its side, and says so; with what is upright."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return data(saved(picture(1), "PNG", exif=exif)), picture(1).rotate(-90, expand=True)


def palette():
    made = picture(1).quantize(16)
    return data(saved(made, "PNG")), made.convert("RGB")


def alpha():
    made = picture(1).convert("RGBA")
    made.putalpha(picture(2).convert("L"))
    white = Image.new("RGBA", made.size, "white")
    return data(saved(made, "WEBP", lossless=True, exact=True), "webp"), Image.alpha_composite(white, made).convert(
        "RGB"
    )


def deep():
    gray = np.asarray(picture(1).convert("L"))
    return data(saved(Image.fromarray(gray.astype(np.uint16) * 257), "PNG")), Image.fromarray(gray).convert("RGB")


def cmyk():
    raw = saved(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG")
    return data(raw, "jpeg"), Image.new("RGB", (16, 16), (0, 255, 255))


ORIENTATION = 0x0112  # EXIF


@pytest.mark.parametrize("unusual", [rotated, palette, alpha, deep, cmyk])
def test_an_unusual_image_is_what_it_looks_like(http, unusual):
    """Its first token has the log-probability that the plain picture's has: it has become the same rows."""

    def seen(url):
        ask = {"messages": [user(text("x"), image(url))], "max_tokens": 1, "logprobs": True, "temperature": 0}
        answer = http.post(CHAT, json=ask)
        assert answer.status_code == 200, answer.text
        (token,) = answer.json()["choices"][0]["logprobs"]["content"]
        return token["bytes"], token["logprob"]

    url, plain = unusual()
    found, expected = seen(url), seen(uri(plain))
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=1e-4)
    assert expected != seen(uri(picture(3)))


def test_the_server_still_answers(http):
    ask = {"messages": [user(text("x"), image(uri(picture(1))))], "max_tokens": 2}
    assert http.post(CHAT, json=ask).json()["usage"]["completion_tokens"] == 2
    assert http.get("/health").json() == {"status": "ready"}


def test_a_text_only_server_refuses_image_parts_by_name(tmp_path):
    folder = tiny_checkpoint.save_llama(tmp_path / "tiny")
    with (
        serving(AsyncLLM(model=str(folder), kv_cache_gb=0.02, num_threads=1)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        for route in (CHAT, "/tokenize"):
            answer = client.post(route, json={"messages": [user(text("x"), image(uri(picture(1))))]})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "messages[0].content[1].image_url"
            assert "text parts only" in answer.json()["error"]["message"]
