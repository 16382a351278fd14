"""A driver of no engine: answers that can be told ahead, and every way to fail. Run by `drivers/main.py`."""

import os
import time
from typing import Any


class Engine:
    """Token k of the answer to a prompt is its first token + k, + 1000 for each adapter's number from 1 on."""

    def __init__(self, *, options: dict[str, Any], adapters: list[str], **_others: Any) -> None:
        print("an engine that writes to standard output")
        self._fails = options.get("fails")
        self._adapters = adapters
        if self._fails == "load":
            raise ValueError("no such model\nand more")

    def answer(self, prompts: list[list[int]], num_tokens: int, adapters: list[int | None]) -> list[list[int]]:
        print("busy", flush=True)
        if self._fails == "raise":
            raise RuntimeError("out of memory")
        if self._fails == "exit":
            os.write(2, b"bad things\nSegmentation fault\n\n")
            os._exit(3)
        if self._fails == "hang":
            time.sleep(60)
        if self._fails == "long":  # the second call of a cell asks for many tokens
            self._fails = "raise"
        short = self._fails == "short"
        time.sleep(0.001 * num_tokens)
        return [
            [prompt[0] + (0 if index is None else 1000 * (index + 1)) + k for k in range(num_tokens - short)]
            for prompt, index in zip(prompts, adapters, strict=True)
        ]

    def embed(self, texts: list[str]) -> list[list[float]]:
        return [[1.0, float(self._fails == "turned"), 0.0] for _ in texts]

    def pid(self) -> int:
        return os.getpid()
