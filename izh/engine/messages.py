"""What the frontend and the engine process say to each other.

Owns: the messages and their wire form (msgpack through msgspec, one message a ZeroMQ frame).
Must not know: sockets, processes.
"""

import msgspec

from izh.config import EngineOptions
from izh.model.source import SourceKind
from izh.request import EngineStats, Output, Request


class Start(msgspec.Struct, tag=True):
    """To the engine, first: build yourself. The source is resolved (downloaded, converted) already."""

    options: EngineOptions
    path: str
    name: str
    kind: SourceKind


class Add(msgspec.Struct, tag=True):
    """To the engine: admit these requests."""

    requests: list[Request]


class Abort(msgspec.Struct, tag=True):
    """To the engine: end these requests; ids that are not live are ignored."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag=True):
    """To the engine: later requests reuse nothing computed so far."""


class Ready(msgspec.Struct, tag=True):
    """From the engine, once: it is built."""

    max_model_len: int
    vocab_size: int


class Broken(msgspec.Struct, tag=True):
    """From the engine, instead of Ready: it cannot be built, and why."""

    error: str


class Stepped(msgspec.Struct, tag=True):
    """From the engine, after each step that said something."""

    outputs: list[Output]
    stats: EngineStats


ToEngine = Start | Add | Abort | ResetPrefixCache
FromEngine = Ready | Broken | Stepped

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
