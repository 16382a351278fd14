"""A real server on a free port, in a thread of its own, around a real engine process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from izh.config import ServerOptions
from izh.engine.async_llm import AsyncLLM
from izh.server.app import Server


@contextmanager
def serving(llm: AsyncLLM, *, multimodal_processor: Any = None, **options: object) -> Iterator[str]:
    """Yields the server's URL; the server and its engine are stopped whatever happens."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def wait(work, timeout_s=120):
        return asyncio.run_coroutine_threadsafe(work, loop).result(timeout_s)

    server = Server(llm, ServerOptions(port=0, **options), multimodal_processor=multimodal_processor)
    try:
        yield wait(server.start())
    finally:
        wait(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
