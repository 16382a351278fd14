"""When the engine process dies the server says so, brings it back, and goes on."""

import os
import signal
import threading
import time

import httpx
import tiny_checkpoint
from serving import serving

from izh.engine.async_llm import AsyncLLM


def running(metrics):
    line = next(line for line in metrics.splitlines() if line.startswith("izh:num_requests_running{"))
    return float(line.rpartition(" ")[2])


def test_a_dead_engine_fails_live_requests_and_comes_back(tmp_path):
    llm = AsyncLLM(model=str(tiny_checkpoint.save_llama(tmp_path / "tiny")), kv_cache_gb=0.02, num_threads=1)
    ask = {"prompt": "hello", "max_tokens": 240, "ignore_eos": True, "n": 128}
    with serving(llm) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert http.get("/health").json() == {"status": "ready"}
        answers = []

        def post():
            answers.append(httpx.post(f"{url}/v1/completions", json=ask, timeout=60))

        live = threading.Thread(target=post)
        live.start()
        deadline = time.monotonic() + 30
        while running(http.get("/metrics").text) == 0:
            assert time.monotonic() < deadline, "the request did not start"
        os.kill(llm.engine_pid, signal.SIGKILL)
        live.join(30)
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "engine_dead"
        states = set()
        deadline = time.monotonic() + 60
        while (health := http.get("/health")).status_code != 200:
            states.add((health.status_code, health.json()["status"]))
            assert time.monotonic() < deadline, "the engine did not come back"
            time.sleep(0.02)
        assert states == {(503, "dead")}
        assert http.post("/v1/completions", json=ask | {"max_tokens": 2}).status_code == 200
