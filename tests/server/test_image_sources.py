"""What may be fetched, and what never is: no network here, a resolver and a transport that remember what was asked."""

import asyncio
import os

import httpx
import pytest

from izh.config import ServerOptions
from izh.errors import OptionError, RequestError
from izh.multimodal.decode import read_data_uri
from izh.server.addresses import is_public, parse_target
from izh.server.image_sources import MAX_REDIRECTS, ImageSources

PUBLIC = "93.184.215.14"
PNG = b"\x89PNG..."
PARAM = "messages[0].content[1].image_url"


class Network:
    """`names` maps hosts to addresses, `pages` (host, path) to answers."""

    def __init__(self, names=None, pages=None):
        self.names = {"images.test": [PUBLIC]} | (names or {})
        self.pages = pages or {}
        self.resolved: list[str] = []
        self.connected: list[tuple[str, str, str]] = []

    async def resolve(self, host, port):
        self.resolved.append(host)
        if host not in self.names:
            raise OSError(f"no such host at 10.0.0.53: {host}")
        return self.names[host]

    async def handle(self, request):
        self.connected.append((request.url.host, request.headers["host"], request.extensions["sni_hostname"]))
        page = self.pages[request.headers["host"], request.url.raw_path.decode()]
        return await page(request)

    def sources(self, *hosts, **options):
        transport = httpx.MockTransport(self.handle)
        return ImageSources(hosts, resolve_host=self.resolve, transport=transport, **options)


def read(sources, url):
    return asyncio.run(sources.read(url, PARAM))


def refused(sources, url):
    with pytest.raises(RequestError) as caught:
        read(sources, url)
    assert caught.value.param == PARAM
    assert caught.value.message.startswith(PARAM)
    return caught.value.message


def page(body=PNG, status=200, **headers):
    async def answer(request):
        async def pieces():
            yield body

        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.Response(status, content=pieces(), headers=named)

    return answer


def moved(location, status=302):
    return page(b"", status, location=location)


PRIVATE = [
    "127.0.0.1",
    "127.255.255.254",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "192.0.0.1",
    "192.0.2.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:a00:1",
    "64:ff9b::7f00:1",
    "64:ff9b:1::a00:1",
    "2002:7f00:1::",
    "2001:0:7f00:1::",
    "2001:db8::1",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "fc00::1",
    "fd12:3456::1",
    "ff02::1",
    "not an address",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_a_name_with_such_an_address_is_not_visited(address):
    assert not is_public(address)
    for addresses in ([address], [PUBLIC, address]):
        network = Network({"inside.test": addresses})
        assert "no public address" in refused(network.sources("inside.test"), "https://inside.test/a.png")
        assert network.connected == []


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses_are(address):
    assert is_public(address)


LOOPBACK = [
    "127.0.0.1",
    "127.0.0.1.",
    "2130706433",
    "0x7f000001",
    "0x7f.1",
    "0177.0.0.1",
    "127.1",
    "127.0.1",
    "0",
    "localhost",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "[0:0:0:0:0:ffff:7f00:1]",
    "127\u30020\u30020\u30021",  # ideographic full stops
    "\uff11\uff12\uff17.0.0.1",  # fullwidth digits
]


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_in_every_notation_is_refused_listed_or_not(host):
    url = f"https://{host}/a.png"
    assert "not one that this server fetches" in refused(Network().sources("images.test"), url)
    # With the system's own resolver, which knows these notations.
    try:
        listed = ImageSources((host,), transport=httpx.MockTransport(Network().handle))
    except OptionError:
        return
    message = refused(listed, url)
    assert "no public address" in message or "could not be fetched" in message


@pytest.mark.parametrize(
    "url",
    [
        "http://images.test/a.png",
        "ftp://images.test/a.png",
        "gopher://images.test/",
        "//images.test/a.png",
        "images.test/a.png",
        "javascript:alert(1)",
        "",
        "https://",
        "https:///a.png",
        "https://images.test:99999/a.png",
        "https://images.test:8443/a.png",
        "https://user:secret@images.test/a.png",
        "https://images.test@127.0.0.1/a.png",
        "https://127.0.0.1\\@images.test/a.png",
        "https://images.test /a.png",
        "https://images.test\n/a.png",
        "https://images.test%2f.evil.test/a.png",
        "https://evil.test#images.test/a.png",
        "https://evil.test?images.test",
        "https://images.test.evil.test/a.png",
        "https://evilimages.test/a.png",
        "https://" + "a" * 300 + ".test/",
        "https://[::1/a.png",
        "file:///etc/passwd",
        "data:text/plain;base64,AA==",
        "https://sub.images.test/a.png",
    ],
)
def test_no_other_url_reaches_a_resolver(url):
    network = Network({"evil.test": [PUBLIC]})
    refused(network.sources("images.test"), url)
    assert network.resolved == []
    assert network.connected == []


def test_an_image_comes_from_the_address_that_was_checked_under_the_hosts_own_name():
    network = Network(pages={("images.test", "/a%20b.png?x=1&y=%2F"): page(content_type="image/png; charset=x")})
    got = read(network.sources("images.test"), "https://Images.TEST/a%20b.png?x=1&y=%2F#part")
    assert (got.data, got.media_type, got.param) == (PNG, "image/png", PARAM)
    assert network.resolved == ["images.test"]
    assert network.connected == [(PUBLIC, "images.test", "images.test")]


def test_a_type_that_says_nothing_is_left_to_the_bytes_and_one_that_is_no_image_of_ours_is_refused():
    pages = {("images.test", "/a"): page(content_type="application/octet-stream"), ("images.test", "/b"): page()}
    for name in ("a", "b"):
        assert read(Network(pages=pages).sources("images.test"), f"https://images.test/{name}").media_type is None
    svg = Network(pages={("images.test", "/c"): page(content_type="image/svg+xml")})
    assert "image/svg+xml" in refused(svg.sources("images.test"), "https://images.test/c")


def test_names_below_a_name_and_other_ports_are_listed_as_such():
    network = Network(
        {"a.cdn.test": [PUBLIC], "cdn.test": [PUBLIC], "xn--bcher-kva.test": ["2606:4700::1111"]},
        {
            ("a.cdn.test", "/"): page(),
            ("images.test:8443", "/"): page(),
            ("xn--bcher-kva.test", "/"): page(),
        },
    )
    sources = network.sources("*.cdn.test", "images.test:8443", "bücher.test")
    for url in ("https://a.cdn.test", "https://images.test:8443/", "https://BÜCHER.test/"):
        assert read(sources, url).data == PNG
    assert network.connected[-1][0] == "2606:4700::1111"
    for url in ("https://cdn.test/", "https://images.test/", "https://evilcdn.test/"):
        assert "not one that" in refused(sources, url)


def test_redirects_are_checked_each_like_the_first():
    network = Network(
        {"inside.test": ["10.0.0.1"], "cdn.test": [PUBLIC]},
        {
            ("images.test", "/ok"): moved("https://cdn.test/x"),
            ("cdn.test", "/x"): moved("/y", 307),
            ("cdn.test", "/y"): page(),
            ("images.test", "/unlisted"): moved("https://evil.test/"),
            ("images.test", "/private"): moved("https://inside.test/"),
            ("images.test", "/literal"): moved("https://127.0.0.1/"),
            ("images.test", "/plain"): moved("http://images.test/ok"),
            ("images.test", "/file"): moved("file:///etc/passwd"),
            ("images.test", "/relative"): moved("//evil.test/"),
            ("images.test", "/loop"): moved("/loop", 301),
        },
    )
    sources = network.sources("images.test", "cdn.test", "inside.test")
    assert read(sources, "https://images.test/ok").data == PNG
    for name in ("unlisted", "literal", "relative"):
        assert "not one that this server fetches" in refused(sources, f"https://images.test/{name}")
    assert "no public address" in refused(sources, "https://images.test/private")
    for name in ("plain", "file"):
        assert "must begin with https://" in refused(sources, f"https://images.test/{name}")
    network.connected.clear()
    assert f"more than {MAX_REDIRECTS} redirects" in refused(sources, "https://images.test/loop")
    assert len(network.connected) == MAX_REDIRECTS + 1
    assert {address for address, *_ in network.connected} == {PUBLIC}


def test_a_name_that_changes_its_address_is_checked_again_at_a_redirect():
    network = Network(pages={("images.test", "/a"): moved("/b")})
    answers = iter([[PUBLIC], ["127.0.0.1"]])

    async def resolve(host, port):
        return next(answers)

    sources = ImageSources(("images.test",), resolve_host=resolve, transport=httpx.MockTransport(network.handle))
    assert "no public address" in refused(sources, "https://images.test/a")
    assert len(network.connected) == 1


def test_bytes_are_bounded_while_they_come_in():
    sent = 0

    async def endless(request):
        async def pieces():
            nonlocal sent
            while True:
                sent += 1000
                yield b"x" * 1000

        return httpx.Response(200, content=pieces())

    network = Network(
        pages={
            ("images.test", "/endless"): endless,
            ("images.test", "/announced"): page(b"", content_length="10001"),
            ("images.test", "/zipped"): page(content_encoding="gzip"),
            ("images.test", "/fits"): page(b"y" * 10_000),
        }
    )
    sources = network.sources("images.test", max_bytes=10_000)
    assert "more than the 10000 bytes" in refused(sources, "https://images.test/endless")
    assert sent <= 12_000
    assert "10001 bytes" in refused(sources, "https://images.test/announced")
    assert "compressed" in refused(sources, "https://images.test/zipped")
    assert len(read(sources, "https://images.test/fits").data) == 10_000


@pytest.mark.parametrize("where", ["resolve", "connect", "trickle"])
def test_time_is_bounded_whatever_it_is_spent_on(where):
    async def slow(request):
        async def pieces():
            while True:
                await asyncio.sleep(0.02)
                yield b"x"

        if where == "connect":
            await asyncio.sleep(60)
        return httpx.Response(200, content=pieces())

    network = Network(pages={("images.test", "/"): slow})

    async def resolve(host, port):
        await asyncio.sleep(60 if where == "resolve" else 0)
        return [PUBLIC]

    sources = ImageSources(
        ("images.test",), timeout_s=0.1, resolve_host=resolve, transport=httpx.MockTransport(network.handle)
    )
    assert "within 0.1 s" in refused(sources, "https://images.test/")


def test_failures_tell_nothing_of_the_network():
    def fail(request):
        raise httpx.ConnectError("connection refused by 10.0.0.7")

    network = Network({"gone.test": []}, {("images.test", "/404"): page(status=404)})
    assert "status 404" in refused(network.sources("images.test"), "https://images.test/404")
    assert "10.0.0.53" not in refused(network.sources("unknown.test"), "https://unknown.test/")
    assert "no public address" in refused(network.sources("gone.test"), "https://gone.test/")
    broken = ImageSources(("images.test",), resolve_host=network.resolve, transport=httpx.MockTransport(fail))
    assert refused(broken, "https://images.test/") == f"{PARAM}: the image could not be fetched"


@pytest.mark.parametrize("host", ["", "https://images.test", "a/b", "user@images.test", "images.test:x", "a b"])
def test_what_is_no_host_is_no_option(host):
    with pytest.raises(OptionError, match="--allow-image-hosts"):
        ImageSources((host,))


def test_target_of_a_url():
    target = parse_target("https://EXAMPLE.test./a/ä?q=ü")
    assert (target.host, target.port, target.path) == ("example.test", 443, "/a/%C3%A4?q=%C3%BC")
    assert target.authority == "example.test"
    assert parse_target("https://[2606:4700::1111]:444/").authority == "[2606:4700::1111]:444"


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    inside, outside = tmp_path / "images", tmp_path / "secret"
    (inside / "sub").mkdir(parents=True)
    outside.mkdir()
    (inside / "a b.png").write_bytes(PNG)
    (inside / "sub" / "c.png").write_bytes(b"c" * 100)
    (outside / "key.png").write_bytes(b"key")
    (inside / "link.png").symlink_to(inside / "a b.png")
    (inside / "out.png").symlink_to(outside / "key.png")
    (inside / "outdir").symlink_to(outside)
    (inside / "loop").symlink_to(inside / "loop")
    os.mkfifo(inside / "pipe")
    return inside


def test_files_below_the_root_are_read_links_followed(root):
    sources = ImageSources(root=str(root))
    for name in ("a%20b.png", "link.png", "sub/../a%20b.png"):
        assert read(sources, f"file://{root}/{name}").data == PNG
    assert read(sources, f"file://localhost{root}/sub/c.png").media_type is None


def test_nothing_else_is_read(root):
    sources = ImageSources(root=str(root), max_bytes=50)
    outside = root.parent / "secret"
    for url in (
        f"file://{outside}/key.png",
        f"file://{root}/out.png",
        f"file://{root}/outdir/key.png",
        f"file://{root}/../secret/key.png",
        f"file://{root}/%2e%2e/secret/key.png",
        f"file://{root}-other/x.png",
        "file:///etc/passwd",
        "file:///proc/self/environ",
    ):
        assert "must lie in the server's --image-root" in refused(sources, url)
    for name in ("missing.png", "loop", "a%00b", "x" * 5000):
        assert "no such file" in refused(sources, f"file://{root}/{name}")
    for name in ("sub", "pipe", ""):
        assert "no such file" in refused(sources, f"file://{root}/{name}")
    assert "more than the 50" in refused(sources, f"file://{root}/sub/c.png")
    for url in (f"file://host{root}/a.png", f"file://{root}/a.png?x", f"file://{root}/a.png#x"):
        assert "must have the form" in refused(sources, url)
    assert "must be one of" in refused(ImageSources(), f"file://{root}/link.png")


def test_a_root_must_be_there(tmp_path):
    with pytest.raises(OptionError, match="no such directory"):
        ImageSources(root=str(tmp_path / "missing"))


def test_data_uris_are_always_open():
    got = read(ImageSources(), "data:image/png;base64,AAEC")
    assert (got.media_type, got.data) == read_data_uri("data:image/png;base64,AAEC", PARAM)
    assert ServerOptions().allow_image_hosts == ()
