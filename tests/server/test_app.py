"""The server's life: the port, the engine, the URL."""

import asyncio
import socket

import httpx
import pytest
from asgi import client
from fake_engine import FakeEngine

from izh.config import ServerOptions
from izh.errors import OptionError
from izh.server.app import Server, _bind


async def test_it_serves_on_a_free_port_and_stops():
    engine = FakeEngine()
    server = Server(engine, ServerOptions(port=0))
    url = await server.start()
    async with httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/health")).json() == {"status": "ready"}
        assert (await http.post("/v1/completions", json={"prompt": "x"})).json()["choices"][0]["text"] == "hello world"
    await server.stop()
    assert engine.state == "dead"
    async with httpx.AsyncClient(base_url=url) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")


async def test_an_address_with_colons_is_bracketed():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    server = Server(FakeEngine(), ServerOptions(host="::1", port=0))
    url = await server.start()
    assert url.startswith("http://[::1]:")
    await server.stop()


async def test_a_taken_port_is_told_before_a_model_is_loaded():
    engine = FakeEngine()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"cannot listen on 127.0.0.1:{port} .*choose another"):
            await Server(engine, ServerOptions(port=port)).start()
    assert engine.state == "starting"


async def test_an_engine_that_cannot_start_frees_the_port():
    class Broken(FakeEngine):
        async def start(self, encoders=None):
            raise OptionError("no such model")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Server(Broken(), ServerOptions(port=port))
    for _ in range(2):
        with pytest.raises(OptionError, match="no such model"):
            await server.start()


async def test_under_another_server_the_lifespan_starts_and_ends_the_engine():
    engine = FakeEngine()
    app = Server(engine).app
    async with app.router.lifespan_context(app):
        assert engine.state == "ready"
    assert engine.state == "dead"


async def test_an_engine_that_is_away_is_unhealthy():
    engine = FakeEngine()
    engine.state = "dead"
    async with client(engine) as http:
        for path in ("/health", "/ping"):
            answer = await http.get(path)
            assert answer.status_code == 503
            assert answer.json() == {"status": "dead"}


async def test_answers_leave_at_once():
    """Nagle's algorithm would hold back the second piece of each answer until the first is acknowledged: 40 ms."""
    accepted = asyncio.get_running_loop().create_future()

    class Accepting(asyncio.Protocol):
        def connection_made(self, transport):
            accepted.set_result(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    port = _bind("127.0.0.1", 0)
    async with await asyncio.get_running_loop().create_server(Accepting, sock=port):
        _, writer = await asyncio.open_connection(*port.getsockname())
        assert await accepted == 1
        writer.close()
