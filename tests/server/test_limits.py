"""The key, the number in flight, the size of the body: before any route, and never for probes."""

import asyncio
import itertools

import httpx
import pytest
from asgi import Exchange, client, until
from fake_engine import FakeEngine

from izh.config import ServerOptions
from izh.errors import OptionError
from izh.outputs import CompletionOutput
from izh.server import limits
from izh.server.app import Server

TEXT = "/v1/completions"
ASK = {"prompt": "hello", "max_tokens": 2}


def error_of(answer):
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "header",
    [None, "", "secret", "Bearer", "Bearer ", "Bearer wrong", "Basic secret", "Bearer secret2", "Bearer s\xe9cret"],
)
async def test_without_the_right_key_nothing_is_answered(header):
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    engine = FakeEngine()
    async with client(engine, api_key="secret") as http:
        for method, path in (("POST", TEXT), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/nothing")):
            answer = await http.request(method, path, json=ASK, headers=headers)
            assert answer.status_code == 401
            assert error_of(answer)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    assert engine.num_begun == 0


@pytest.mark.parametrize(
    ("key", "header"), [("secret", "Bearer secret"), ("secret", "bearer  secret"), ("é", "Bearer é")]
)
async def test_with_the_key_everything_is(key, header):
    async with client(FakeEngine(), api_key=key) as http:
        answer = await http.post(TEXT, json=ASK, headers={"Authorization": header.encode()})
        assert answer.status_code == 200


async def test_probes_need_no_key():
    engine = FakeEngine()
    await engine.start()
    async with client(engine, api_key="secret") as http:
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert (await http.get(path)).status_code == 200


async def test_the_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("IZH_API_KEY", "secret")
    async with client(FakeEngine()) as http:
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/v1/models", headers={"Authorization": "Bearer secret"})).status_code == 200


def test_an_empty_key_is_no_key():
    with pytest.raises(OptionError, match="api_key is empty"):
        Server(FakeEngine(), ServerOptions(api_key=""))


async def test_one_request_too_many_is_told_to_come_back():
    go = asyncio.Event()

    async def wait(_prompt, _params):
        await go.wait()
        yield CompletionOutput(0, "x", [5], finish_reason="stop")

    engine = FakeEngine(wait)
    await engine.start()
    async with client(engine, max_concurrent_requests=2) as http:
        held = [asyncio.create_task(http.post(TEXT, json=ASK | {"stream": stream})) for stream in (False, True)]
        await until(lambda: engine.num_live == 2)
        refused = await http.post(TEXT, json=ASK)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "2 requests are in flight" in error_of(refused)["message"]
        assert (await http.get("/health")).status_code == 200
        go.set()
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [200, 200]
        assert (await http.post(TEXT, json=ASK)).status_code == 200


async def test_a_request_that_fails_frees_its_place():
    async def fail(_prompt, _params):
        raise RuntimeError
        yield

    async with client(FakeEngine(fail), max_concurrent_requests=1) as http:
        assert [(await http.post(TEXT, json=ASK)).status_code for _ in range(3)] == [500] * 3


@pytest.mark.parametrize("num_chunks", [1, 7])
@pytest.mark.parametrize(("excess", "status"), [(0, 200), (1, 413)])
async def test_the_body_is_counted_to_the_byte(num_chunks, excess, status):
    limit = 1000
    body = b'{"prompt": "hello", "max_tokens": 2' + b" " * (limit + excess - 36) + b"}"
    assert len(body) == limit + excess
    step = -(-len(body) // num_chunks)
    chunks = [body[i : i + step] for i in range(0, len(body), step)]
    app = Server(FakeEngine(), ServerOptions(max_body_mb=limit / 2**20)).app
    exchange = Exchange(app, TEXT, chunks)
    await exchange.end()
    assert exchange.status == status


async def test_an_endless_body_is_read_for_a_moment_only(monkeypatch):
    monkeypatch.setattr(limits, "LINGER_S", 0.05)
    app = Server(FakeEngine(), ServerOptions(max_body_mb=0.01)).app
    exchange = Exchange(app, TEXT, itertools.repeat(b" " * 1000))
    await exchange.end()
    assert exchange.status == 413
    assert exchange.num_received > 11


@pytest.mark.parametrize(("headers", "num_received"), [([], 3), ([(b"expect", b"100-continue")], 0)])
async def test_an_announced_length_is_enough(headers, num_received):
    app = Server(FakeEngine(), ServerOptions(max_body_mb=0.01)).app
    exchange = Exchange(app, TEXT, [b" ", b"{", b"}"], headers=[(b"content-length", b"20000"), *headers])
    await exchange.end()
    assert exchange.status == 413
    assert exchange.num_received == num_received
    assert b"this one has 20000 bytes" in exchange.body


async def test_who_sends_too_much_still_hears_why():
    server = Server(FakeEngine(), ServerOptions(port=0, max_body_mb=0.25))
    url = await server.start()
    async with httpx.AsyncClient(base_url=url) as http:
        for _ in range(20):
            answer = await http.post(TEXT, json={"prompt": "x" * 5_000_000})
            assert answer.status_code == 413
    await server.stop()
