"""The one map from errors to answers, in the shape that the OpenAI API gives them.

Owns: Problem (status, type, code, text), `describe`, and the exception handlers of the application.
Must not know: any route. Errors inside a stream use the same map (`sse.py`), and so do the limits (`limits.py`).
Invariant: whatever goes wrong, the client gets {"error": {"message", "type", "param", "code"}}; what nobody expected
says no more than "internal error", and its traceback goes to the log.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from izh.errors import (
    AdapterInUseError,
    ContextLengthError,
    EngineDeadError,
    IzhError,
    NotFoundError,
    OverloadedError,
    RequestError,
)

log = logging.getLogger("izh.server")

CLIENT_CLOSED_REQUEST = 499
_RETRY_AFTER_S = "1"
# A field's name and one of these make a sentence; pydantic's messages do not.
_MUST = {"model_attributes_type": "must be an object", "dict_type": "must be an object"}
_WORDS = {
    "Value error, ": "",
    "Input should be": "must be",
    "Input should have": "must have",
    "greater than or equal to": "at least",
}
_MAX_SHOWN = 80  # characters of a wrong value that a message repeats


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One error, as the client will see it."""

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body. Text from the request may hold lone surrogates, which UTF-8 cannot write."""
        message, param = printable(self.message), self.param and printable(self.param)
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    @property
    def response(self) -> Response:
        return JSONResponse(self.body, self.status, headers=dict(self.headers))


_INTERNAL = Problem(status=500, message="internal error", type="server_error", code="internal_error")


def describe(error: Exception) -> Problem:
    """The answer to an error raised while serving a request. Those that are no fault of the client are logged."""
    match error:
        case ContextLengthError():
            return Problem(status=400, message=error.message, code="context_length_exceeded", param=error.param)
        case NotFoundError():
            code = "model_not_found" if error.param == "model" else "not_found"
            return Problem(status=404, message=error.message, code=code, param=error.param)
        case RequestError():
            return Problem(status=400, message=error.message, param=error.param)
        case AdapterInUseError():
            return Problem(status=409, message=str(error), code="adapter_in_use", param="lora_name")
        case OverloadedError():
            return overloaded(str(error))
        case EngineDeadError():
            headers = {"Retry-After": _RETRY_AFTER_S}
            return Problem(status=503, message=str(error), type="server_error", code="engine_dead", headers=headers)
        case IzhError():
            log.error("a request failed: %s", error)
            return Problem(status=500, message=str(error), type="server_error", code="internal_error")
        case _:
            log.error("a request failed unexpectedly", exc_info=error)
            return _INTERNAL


def overloaded(message: str) -> Problem:
    """429: the same request may succeed in a moment."""
    headers = {"Retry-After": _RETRY_AFTER_S}
    return Problem(status=429, message=message, type="rate_limit_error", code="overloaded", headers=headers)


def shown(value: Any) -> str:
    """A wrong value, short enough for a message of one line."""
    # Cut before repr: a value may be megabytes long.
    text = repr(value[:_MAX_SHOWN]) if isinstance(value, str | list) else repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def printable(text: str) -> str:
    """The text with lone surrogates spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def handle(app: FastAPI) -> None:
    """Answer every error of the application's routes by this map."""

    async def izh_error(request: Request, error: Exception) -> Response:
        return describe(error).response

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _validation_problem(error.errors()).response

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _http_problem(request, error).response

    async def unexpected(request: Request, error: Exception) -> Response:
        return _INTERNAL.response  # not logged here: Starlette raises it further, and the HTTP server logs it

    async def disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody reads it; it names the case in access logs

    app.add_exception_handler(IzhError, izh_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, disconnect)
    app.add_exception_handler(Exception, unexpected)


def _http_problem(request: Request, error: HTTPException) -> Problem:
    """Errors of routing and of reading the body."""
    headers = error.headers or {}
    match error.status_code:
        case HTTPStatus.NOT_FOUND:
            message, code = f"no such route: {request.method} {request.url.path}", "not_found"
        case HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = headers.get("Allow", "another method")
            message = f"{request.method} is not allowed for {request.url.path}; use {allowed}"
            code = "method_not_allowed"
        case HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            message, code = error.detail, "request_too_large"
        case HTTPStatus.BAD_REQUEST:
            message, code = "the body could not be read as JSON in UTF-8", "invalid_json"
        case _:
            message, code = error.detail, "http_error"
    return Problem(status=error.status_code, message=message, code=code, headers=headers)


def _validation_problem(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """The first thing wrong with a body, in one line."""
    first = errors[0]
    place, kind, value = first["loc"][1:], first["type"], first.get("input")
    param = _path(place)
    cause = first.get("ctx", {}).get("error")
    if kind == "json_invalid":
        message = f"the body is not valid JSON: {cause} at character {place[0]}"
        return Problem(status=400, message=message, code="invalid_json")
    if isinstance(cause, RequestError):  # raised by a validator of schema.py
        param = _path((*place, cause.param)) if cause.param else param
        return Problem(status=400, message=cause.message, param=param)
    if not place:
        got = "nothing" if value is None else shown(value)
        message = f"the body must be a JSON object, sent with 'Content-Type: application/json', got {got}"
    elif kind == "missing":
        message = f"{param} is required"
    else:
        must = _MUST.get(kind, first["msg"])
        for theirs, ours in _WORDS.items():
            must = must.replace(theirs, ours)
        message = f"{param} {must}, got {shown(value)}"
    return Problem(status=400, message=message, param=param or None)


def _path(place: Sequence[Any]) -> str:
    """('messages', 0, 'content') as messages[0].content."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).lstrip(".")
