"""What a request must pass before any route sees it: the key, the number in flight, the size of its body.

Owns: three pure ASGI layers, each with one rule. They read headers and count bytes and never hold a body.
Must not know: routes, beyond which paths are open to everybody; schemas; the engine.
Invariant: a path is closed unless it is listed as open, so that a new route is never open by oversight.
"""

import asyncio
import hashlib
import secrets
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from izh.server.errors import Problem, overloaded

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
"""Answered without a key and however busy the server is: probes must always get through."""


LINGER_S = 2.0
"""How long a body that is too large is read on (`_linger`)."""


def _is_open(scope: Scope) -> bool:
    return scope["type"] != "http" or scope["path"] in OPEN_PATHS


class KeyCheck:
    """Answers 401 unless the request carries 'Authorization: Bearer KEY'."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._digest = _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_open(scope) or self._is_right(Headers(scope=scope).get("authorization", "")):
            await self._app(scope, receive, send)
            return
        problem = Problem(
            status=401,
            message="a valid API key is required: send the header 'Authorization: Bearer KEY'",
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await problem.response(scope, receive, send)

    def _is_right(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        # Headers are decoded as latin-1. Digests are compared, so that not even the key's length shows in the time.
        given = _digest(key.strip().encode("latin-1"))
        return scheme.lower() == "bearer" and secrets.compare_digest(given, self._digest)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class ConcurrencyLimit:
    """Answers 429 when `limit` requests are in flight, streams included until their last byte."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._num_in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_open(scope):
            await self._app(scope, receive, send)
            return
        if self._num_in_flight >= self._limit:
            problem = overloaded(f"{self._limit} requests are in flight, the most this server takes; try again shortly")
            await problem.response(scope, receive, send)
            return
        self._num_in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_in_flight -= 1


class BodyLimit:
    """Answers 413 to a body of more than `max_bytes`, by its announced length or, without one, by counting."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "")
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            if announced.isdecimal() and int(announced) > self._max_bytes:
                if headers.get("expect", "").lower() != "100-continue":  # such a client waits for leave to send it
                    await _linger(receive)
                raise self._too_large(f"has {announced} bytes")
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                if message.get("more_body", False):
                    await _linger(receive)
                raise self._too_large("is larger")
            return message

        await self._app(scope, counted, send)

    def _too_large(self, size: str) -> HTTPException:
        # Whoever reads the body raises this through to the application's handler (`errors.py`). Some of the body may be
        # left unread, so the connection cannot serve another request.
        limit = f"{self._max_bytes} bytes ({self._max_bytes / 2**20:g} MiB)"
        return HTTPException(
            413, f"the body may have at most {limit}, this one {size}", headers={"Connection": "close"}
        )


async def _linger(receive: Receive) -> None:
    """Read the rest of a body and forget it, for a moment: a connection closed over unread bytes is reset, and a client
    that is still sending would see the reset instead of the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass
