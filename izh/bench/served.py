"""Servers under measurement, each in a process of its own, stopped whatever happens.

Owns: how izh's and Infinity's are started, and when they are ready.
Must not know: what they are asked.
"""

import asyncio
import multiprocessing
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from izh.bench.peers.catalogue import Environments, how_to_set_up
from izh.config import EngineOptions, ServerOptions
from izh.engine.async_llm import AsyncLLM
from izh.errors import IzhError, OptionError
from izh.server.app import Server

INFINITY_NAME = "model"
"""What Infinity calls the model it serves."""
_INFINITY = "from infinity_emb.cli import cli; cli()"  # what its command does
_STOP_S, _START_S = 30, 180


@contextmanager
def izh_server(engine: EngineOptions, server: ServerOptions) -> Iterator[str]:
    """Yields the URL. Raises OptionError, with the server's own words, when it does not start."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, engine, server))
    process.start()
    theirs.close()
    try:
        try:
            url, error = ours.recv()
        except EOFError:
            raise OptionError("the server's process ended before it was ready; see above") from None
        if error is not None:
            raise OptionError(error)
        yield url
    finally:
        ours.close()  # which the process takes as the word to stop, also when this one dies
        process.join(_STOP_S)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(pipe: Connection, engine: EngineOptions, options: ServerOptions) -> None:
    """The process: say where it listens, or why it does not; serve until the other end of the pipe is closed."""

    async def run() -> None:
        server = Server(AsyncLLM(engine), options)
        try:
            url = await server.start()
        except IzhError as error:
            pipe.send((None, str(error)))
            return
        pipe.send((url, None))
        await asyncio.to_thread(pipe.poll, None)
        await server.stop()

    asyncio.run(run())


def find_infinity(named: str | None) -> tuple[str | None, str | None]:
    """The interpreter that has Infinity, or why there is none. `named` None: that of the peers' environments."""
    python = str(Environments(None).python("infinity")) if named is None else named
    try:
        asked = subprocess.run([python, "-c", "import infinity_emb"], capture_output=True, text=True, check=False)
    except OSError as error:
        return None, f"missing: cannot run {python} ({error.strerror}); {how_to_set_up('infinity')}"
    if asked.returncode != 0:
        last = asked.stderr.strip().splitlines()[-1:] or [f"exit status {asked.returncode}"]
        return None, f"missing: {python} cannot import infinity_emb ({last[0]}); {how_to_set_up('infinity')}"
    return python, None


@contextmanager
def infinity_server(python: str, model: Path, num_threads: int) -> Iterator[str]:
    """Infinity's own server on torch in float32, all else as it comes. Yields the URL. Raises OptionError, with the end
    of its log, when it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    words = [
        "v2",
        "--model-id",
        str(model),
        "--served-model-name",
        INFINITY_NAME,
        "--engine",
        "torch",
        "--device",
        "cpu",
    ]
    words += ["--dtype", "float32", "--no-bettertransformer", "--host", "127.0.0.1", "--port", str(port)]
    variables = {"OMP_NUM_THREADS": str(num_threads), "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [python, "-c", _INFINITY, *words], stdout=log, stderr=log, env=os.environ | variables
        )
        try:
            until_s = time.monotonic() + _START_S
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > until_s:
                    log.seek(0)
                    raise OptionError(f"{python}: infinity_emb did not start; its log ends with: {log.read()[-800:]}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1).status_code == 200
    except httpx.TransportError:
        return False
