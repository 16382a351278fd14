"""One request to an ASGI application, message by message: the client of a test decides when it sends and leaves."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import httpx

from izh.config import ServerOptions
from izh.server.app import Server


def client(engine: Any, **options: Any) -> httpx.AsyncClient:
    """A client of a server around `engine`, without a network."""
    app = Server(engine, ServerOptions(**options)).app
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test", timeout=10
    )


class Exchange:
    """A request under way, with a JSON body or the chunks of one. `sent` has what the application has sent so far;
    `leave` hangs up."""

    def __init__(
        self,
        app: Any,
        path: str,
        body: dict[str, Any] | Iterable[bytes],
        *,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self._gone = asyncio.Event()
        self._chunks = iter([json.dumps(body).encode()] if isinstance(body, dict) else body)
        self._next: bytes | None = next(self._chunks)
        self.num_received = 0
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(b"host", b"test"), (b"content-type", b"application/json"), *headers],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        self._task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._next is not None:
            await asyncio.sleep(0)
            self.num_received += 1
            chunk, self._next = self._next, next(self._chunks, None)
            return {"type": "http.request", "body": chunk, "more_body": self._next is not None}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def leave(self) -> None:
        self._gone.set()

    async def end(self) -> None:
        """Wait until the application is done with the request."""
        async with asyncio.timeout(10):
            await self._task

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def until(condition: Any) -> None:
    """Let other tasks run until `condition()`."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)
