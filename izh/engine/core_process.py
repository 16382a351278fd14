"""The frontend's end of the engine process.

Owns: one child process and the socket to it, from launch to death.
Must not know: requests in flight (`async_llm.py` does), the engine's insides.
Invariant: after `stop`, or after `receive` raised EngineDeadError, no child and no socket is left.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from pathlib import Path

import zmq
import zmq.asyncio

from izh.engine.messages import Broken, FromEngine, Ready, Start, ToEngine, decode_from_engine, encode
from izh.errors import EngineDeadError, error_of

_SPINS = "3000"
"""How long GNU's OpenMP waits busily at a barrier, in turns. By its own default (hundreds of thousands) a thread that
waits takes the core from the frontend, or from the very thread it waits for: with requests of all kinds on 2 cores
some answers took 24 s that take 1.9 s with this; the median takes 1.7 s and not 1.6 (`izh bench mixed`, 12 s each)."""


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The engine process's environment; what the user says of waiting stands."""
    says = "GOMP_SPINCOUNT" in given or "OMP_WAIT_POLICY" in given
    return {**given} if says else {**given, "GOMP_SPINCOUNT": _SPINS}


class CoreProcess:
    """A running engine process. Make one with `launch`."""

    def __init__(self, process: Process, socket: zmq.asyncio.Socket, folder: tempfile.TemporaryDirectory[str]) -> None:
        self._process = process
        self._socket = socket
        self._folder = folder
        self._exit = asyncio.ensure_future(process.wait())

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def launch(cls, start: Start) -> tuple["CoreProcess", Ready]:
        """Start the process and wait until it is built. Raises the engine's own error (ModelLoadError, AdapterError,
        OptionError) when it cannot be, EngineDeadError when it dies instead."""
        folder = tempfile.TemporaryDirectory(prefix="izh-")
        address = f"ipc://{Path(folder.name) / 'engine'}"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set(zmq.LINGER, 0)
        socket.bind(address)
        # A session of its own: Ctrl-C reaches the frontend alone, which then closes the pipe.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "izh.engine.process", address,
            stdin=PIPE, stdout=DEVNULL, start_new_session=True, env=environment(os.environ),
        )  # fmt: skip
        core = cls(process, socket, folder)
        try:
            await core.send(start)
            message = await core.receive()
        except BaseException:
            await core.stop()
            raise
        if isinstance(message, Ready):
            return core, message
        await core.stop()
        assert isinstance(message, Broken)
        raise error_of(message.kind, message.error)

    async def send(self, message: ToEngine) -> None:
        """Queue a message; lost if the process dies first."""
        with contextlib.suppress(zmq.ZMQError):  # the socket is closed: whoever waits in receive is told
            await self._socket.send(encode(message))

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineDeadError when the process has died and said nothing more."""
        frame = asyncio.ensure_future(self._socket.recv())
        await asyncio.wait((frame, self._exit), return_when=asyncio.FIRST_COMPLETED)
        if not frame.done():
            with contextlib.suppress(TimeoutError):  # its last words may still be on the way
                return decode_from_engine(await asyncio.wait_for(frame, timeout=0.2))
            await self.stop()
            raise EngineDeadError(f"the engine process died (exit status {self._exit.result()})")
        return decode_from_engine(frame.result())

    async def stop(self) -> None:
        """End the process, if it still runs, and release everything. Safe to call twice."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not self._exit.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._exit), timeout=2.0)
        if not self._exit.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._exit
        self._socket.close()
        self._folder.cleanup()
