"""Answers that take time: streamed as server-sent events, or waited for, and dropped when the client is gone.

Owns: `while_connected` (work that a disconnect cancels), `stream` (server-sent events) and `merge`.
Must not know: what the events say.
Invariants: the status is sent only after the first event exists, so an error before it is a real HTTP error; a later
one is an event of its own; the last event is always [DONE]. Cancelling reaches the engine: generators are closed here,
never left to the garbage collector.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from izh.server.errors import describe

Item = TypeVar("Item")

_DONE = b"data: [DONE]\n\n"
_END = object()


async def while_connected(receive: Receive, work: Awaitable[Item]) -> Item:
    """Await `work`; when the client goes away first, cancel it and raise ClientDisconnect.

    The request's body must have been read: after it, the only thing left to receive is the disconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _cancel((task, gone))


async def stream(request: Request, events: AsyncGenerator[Any, None]) -> Response:
    """The events as a stream of JSON, once the first one exists. Raises what `events` raises before it."""
    frames = _frames(events)
    first = await while_connected(request.receive, anext(frames))
    return _EventStream(first, frames)


async def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Run all streams at once; yields (stream's index, item) as they come. The first error ends them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[Any] = asyncio.Queue()

    async def pump(index: int, source: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    queue.put_nowait((index, item))
            queue.put_nowait(_END)
        except Exception as error:
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(index, source)) for index, source in enumerate(streams)]
    try:
        num_live = len(pumps)
        while num_live:
            item = await queue.get()
            if item is _END:
                num_live -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        await _cancel(pumps)


class _EventStream(Response):
    """Sends frames while the client is there; closes their generator however it ends."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):  # the status is sent: there is nothing left to answer
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._rest) as rest:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for frame in rest:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _frames(events: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
    has_started = False
    async with aclosing(events):
        try:
            async for event in events:
                has_started = True
                yield b"data: " + msgspec.json.encode(event) + b"\n\n"
        except Exception as error:
            if not has_started:
                raise
            yield b"data: " + msgspec.json.encode(describe(error).body) + b"\n\n"
    yield _DONE


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
