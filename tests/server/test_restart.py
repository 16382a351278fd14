"""When the engine process dies the server says so, brings it back, and goes on."""

import os
import signal
import threading
import time

import httpx
import tiny_checkpoint
from serving import serving

from izh.engine.async_llm import AsyncLLM

HANG_S = 120
"""Where a wait is taken for a hang. A start may have to compile every kernel, on a busy machine."""


def running(metrics):
    line = next(line for line in metrics.splitlines() if line.startswith("izh:num_requests_running{"))
    return float(line.rpartition(" ")[2])


def test_a_dead_engine_fails_live_requests_and_comes_back(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("izh.engine.async_llm.log.error", lambda text, *args: said.append(text % args))
    llm = AsyncLLM(model=str(tiny_checkpoint.save_llama(tmp_path / "tiny")), kv_cache_gb=0.02, num_threads=1)
    ask = {"prompt": "hello", "max_tokens": 240, "ignore_eos": True, "n": 128}
    with serving(llm) as url, httpx.Client(base_url=url, timeout=HANG_S) as http:
        assert http.get("/health").json() == {"status": "ready"}
        answers = []

        def post():
            answers.append(httpx.post(f"{url}/v1/completions", json=ask, timeout=HANG_S))

        live = threading.Thread(target=post)
        live.start()
        deadline = time.monotonic() + HANG_S
        while running(http.get("/metrics").text) == 0:
            assert time.monotonic() < deadline, "the request did not start"
            time.sleep(0.02)  # the engine may have no other core to start it on
        first_pid = llm.engine_pid
        os.kill(first_pid, signal.SIGKILL)
        live.join(HANG_S)
        assert not live.is_alive(), "nobody told the client"
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "engine_dead"
        states = set()
        deadline = time.monotonic() + HANG_S
        while (health := http.get("/health")).status_code != 200:
            states.add((health.status_code, health.json()["status"]))
            assert time.monotonic() < deadline, "the engine did not come back"
            time.sleep(0.02)
        assert states == {(503, "dead")}
        assert llm.engine_pid != first_pid
        (line,) = said  # the first successor is there to stay
        assert "died (exit status -9); 1 live requests fail" in line
        assert http.post("/v1/completions", json=ask | {"max_tokens": 2}).status_code == 200
