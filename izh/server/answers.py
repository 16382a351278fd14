"""Pieces of answers that several routes give.

Owns: ids and times of answers, usage, summing up a stream, how an end is named.
Must not know: any one route's shape.
"""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from izh.errors import IzhError
from izh.outputs import CompletionOutput, RequestOutput


def heading(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """The fields that every answer, and every event of a stream, begins with."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


async def collect(pieces: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    """The whole answer."""
    async with aclosing(pieces):
        whole = await anext(pieces)
        async for piece in pieces:
            whole.add(piece)
    return whole


class Usage:
    """Tokens counted over the requests of one answer."""

    def __init__(self) -> None:
        self.num_prompt = 0
        self.num_cached = 0
        self.num_generated = 0

    def add_prompt(self, num_tokens: int) -> None:
        self.num_prompt += num_tokens

    def add(self, piece: RequestOutput) -> None:
        """Count a piece of a stream, or a whole answer."""
        self.num_cached += piece.num_cached_tokens
        self.num_generated += sum(len(output.token_ids) for output in piece.outputs)

    @property
    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": self.num_prompt + self.num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


def finish_reason(output: CompletionOutput) -> str | None:
    """Why a choice ended, in the API's words, or None while it goes on."""
    if output.finish_reason in ("abort", "error"):
        raise IzhError(f"the request ended early ({output.finish_reason})")
    return output.finish_reason
