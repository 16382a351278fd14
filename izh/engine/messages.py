"""What the frontend and the engine process say to each other.

Owns: the messages and their wire form (msgpack through msgspec, one message a ZeroMQ frame).
Must not know: sockets, processes.
"""

from typing import Literal

import msgspec

from izh.config import EngineOptions
from izh.model.source import SourceKind
from izh.request import EngineStats, Entry, Output, PackedFeatures, Request

EncoderTask = Literal["embed", "rerank"]


class Start(msgspec.Struct, tag=True):
    """To the engine, first: build yourself. The source is resolved (downloaded, converted) already."""

    options: EngineOptions
    path: str
    name: str
    kind: SourceKind
    adapters: dict[str, str]  # that come with the model: name -> directory
    encoders: dict[EncoderTask, str] = {}  # models beside it: task -> directory, or "demo"


class Add(msgspec.Struct, tag=True):
    """To the engine: admit these requests. Features that they share travel once, here, and not in each of them."""

    requests: list[Request]
    features: PackedFeatures | None = None

    @property
    def whole(self) -> list[Request]:
        """The requests, each with the shared features."""
        if self.features is None:
            return self.requests
        return [msgspec.structs.replace(request, features=self.features) for request in self.requests]


class Abort(msgspec.Struct, tag=True):
    """To the engine: end these requests; ids that are not live are ignored."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag=True):
    """To the engine: later requests reuse nothing computed so far."""


class LoadAdapter(msgspec.Struct, tag=True):
    """To the engine: know the adapter of this directory by this name, in place of another if `replace`."""

    call_id: int
    name: str
    directory: str
    replace: bool


class UnloadAdapter(msgspec.Struct, tag=True):
    """To the engine: forget this name."""

    call_id: int
    name: str


class Encode(msgspec.Struct, tag=True):
    """To the engine: compute these with the encoder of this task."""

    call_id: int
    encoder: EncoderTask
    entries: list[Entry]


class Ready(msgspec.Struct, tag=True):
    """From the engine, once: it is built."""

    max_model_len: int
    vocab_size: int
    generates: bool
    adapters: dict[str, str]  # all that it knows: name -> directory


class Broken(msgspec.Struct, tag=True):
    """From the engine, instead of Ready: it cannot be built, and why. `kind` is the error's class."""

    error: str
    kind: str


class Replied(msgspec.Struct, tag=True):
    """From the engine, once for each LoadAdapter and UnloadAdapter: done, or why not. `kind` is the error's class."""

    call_id: int
    adapters: dict[str, str]  # all that it knows now: name -> directory
    error: str | None = None
    kind: str | None = None


class Encoded(msgspec.Struct, tag=True):
    """From the engine, once for each Encode: a vector or raw score of each entry (float32, little-endian), or why there
    are none. `kind` is the error's class."""

    call_id: int
    results: list[bytes] = []
    error: str | None = None
    kind: str | None = None


class Stepped(msgspec.Struct, tag=True):
    """From the engine, after each step that said something."""

    outputs: list[Output]
    stats: EngineStats


ToEngine = Start | Add | Abort | ResetPrefixCache | LoadAdapter | UnloadAdapter | Encode
FromEngine = Ready | Broken | Stepped | Replied | Encoded

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
