"""The engine process: `python -m izh.engine.process ADDRESS`.

Owns: the loop that turns messages into requests and steps into messages.
Must not know: text, HTTP, which features exist.
Invariant: the process never outlives its frontend: its standard input is a pipe whose end means "go".
"""

import logging
import os
import sys
import threading
import time
from pathlib import Path

import zmq

from izh.engine.build import Engine, build, load_encoders
from izh.engine.control import Control
from izh.engine.core import EngineCore
from izh.engine.encoders import Encoders
from izh.engine.messages import (
    Abort,
    Add,
    Broken,
    Encode,
    LoadAdapter,
    Ready,
    ResetPrefixCache,
    Start,
    Stepped,
    UnloadAdapter,
    decode_to_engine,
    encode,
)
from izh.errors import IzhError
from izh.logs import configure_logging
from izh.model.source import ModelSource

log = logging.getLogger("izh.engine")

IDLE_POLL_MS = 10  # how long to wait for a message when a command's files are read, or a gate holds every request back


def main() -> None:
    """Connect, build, serve until the frontend is gone."""
    configure_logging()
    threading.Thread(target=_leave_with_frontend, daemon=True).start()
    socket = zmq.Context().socket(zmq.PAIR)
    socket.connect(sys.argv[1])
    start = decode_to_engine(socket.recv())
    assert isinstance(start, Start), f"the first message must be Start, got {type(start).__name__}"
    source = ModelSource(
        path=Path(start.path),
        name=start.name,
        kind=start.kind,
        adapters={name: Path(directory) for name, directory in start.adapters.items()},
    )
    try:
        # First: what they leave of the memory is shared out next.
        encoders = load_encoders(start.encoders, start.options.quantization)
        engine = build(start.options, source)
    except IzhError as error:
        socket.send(encode(Broken(error=str(error), kind=type(error).__name__)))
        socket.close()  # waits until the message is delivered
        return
    known = {} if engine.adapters is None else engine.adapters.sources
    socket.send(
        encode(
            Ready(
                max_model_len=engine.core.max_model_len,
                vocab_size=engine.core.vocab_size,
                generates=engine.generates,
                adapters={name: str(directory) for name, directory in known.items()},
            )
        )
    )
    serve(engine, encoders, socket)


def serve(engine: Engine, encoders: Encoders, socket: zmq.Socket[bytes]) -> None:
    """Step while there is work, wait for a message while there is none. Never returns."""
    core, control = engine.core, Control(engine.adapters)
    idle = False
    while True:
        has_work = core.has_work or control.is_busy or encoders.is_busy
        timeout_ms = (IDLE_POLL_MS if idle else 0) if has_work else None
        while socket.poll(timeout_ms):
            _receive(core, control, encoders, socket.recv())
            timeout_ms = 0
        for reply in control.replies():
            socket.send(encode(reply))
        start_s = time.perf_counter()
        outputs = core.step()
        step_s = time.perf_counter() - start_s
        stats = core.stats
        did_nothing = not outputs and stats.num_running == 0
        if not did_nothing:
            socket.send(encode(Stepped(outputs=outputs, stats=stats)))
        idle = did_nothing and not encoders.is_busy
        for encoded in encoders.while_idle() if did_nothing else encoders.after_step(step_s):
            socket.send(encode(encoded))


def _receive(core: EngineCore, control: Control, encoders: Encoders, frame: bytes) -> None:
    match decode_to_engine(frame):
        case Add() as arrivals:
            for request in arrivals.whole:
                core.add(request)
        case Abort(request_ids):
            for request_id in request_ids:
                core.abort(request_id)
        case ResetPrefixCache():
            core.reset_prefix_cache()
        case Encode() as call:
            encoders.add(call)
        case LoadAdapter() | UnloadAdapter() as command:
            control.add(command)
        case message:
            raise AssertionError(f"unexpected {type(message).__name__}")


def _leave_with_frontend() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
