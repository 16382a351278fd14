"""The errors a user of izh can meet.

Owns: one class per kind of failure, so that each border can map them once (the server: `server/errors.py`).
Must not know: HTTP, torch, or who raises what.
"""


class IzhError(Exception):
    """Anything izh raises on purpose."""


class RequestError(IzhError, ValueError):
    """The request asks for something that is malformed, impossible or not implemented.

    `param` names the offending field as the caller spelled it, or is None when no single field is at fault.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ContextLengthError(RequestError):
    """Prompt and answer together do not fit the model's context or the KV cache."""


class NotFoundError(RequestError):
    """The request names a model (or another named thing) that is not served here."""


class OverloadedError(IzhError):
    """Too many requests are already waiting; the same request may succeed later."""


class EngineDeadError(IzhError):
    """The engine process died before this request was finished."""


class ModelLoadError(IzhError):
    """A checkpoint cannot be loaded; the message names the file, tensor or config field."""


class AdapterError(IzhError, ValueError):
    """An adapter cannot be loaded, replaced or unloaded; the message names the key, field or file. Nothing changed."""


class AdapterInUseError(AdapterError):
    """An adapter cannot be unloaded while live requests use it."""


class OptionError(IzhError, ValueError):
    """An option's value is impossible on this machine or for this model."""


def error_of(kind: str | None, message: str, param: str | None = None) -> IzhError:
    """An error that crossed the process queue: `kind` is its class's name."""
    for cls in (RequestError, ContextLengthError, NotFoundError):
        if kind == cls.__name__:
            return cls(message, param)
    for other in (AdapterError, AdapterInUseError, ModelLoadError, OptionError):
        if kind == other.__name__:
            return other(message)
    return IzhError(message)
