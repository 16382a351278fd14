"""Adapters loaded, replaced and unloaded over HTTP while others are answered."""

import contextlib
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import adapters_made
import bad_adapters
import httpx
import pytest
import tiny_checkpoint
from serving import serving

from izh.engine.async_llm import AsyncLLM

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = "the quick brown fox jumps over the lazy dog " * 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """tiny (a model), root/one, root/two, root/three (adapters), outside (an adapter beyond the root)."""
    top = tmp_path_factory.mktemp("loading")
    checkpoint = tiny_checkpoint.save_llama(top / "tiny", initializer_range=0.2)
    for seed, name in enumerate(("root/one", "root/two", "root/three", "outside")):
        adapters_made.make(checkpoint, top / name, seed)
    (top / "root" / "link").symlink_to(top / "outside")
    return top


@pytest.fixture(scope="module")
def http(folders):
    llm = AsyncLLM(
        model=str(folders / "tiny"),
        kv_cache_gb=0.02,
        num_threads=1,
        allow_runtime_lora=True,
        lora_root=str(folders / "root"),
        max_loras=2,
    )
    with serving(llm) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def ask(http, model=None, prompt=PROMPT, timeout_s=60, **fields):
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0} | fields
    answer = http.post("/v1/completions", json=body | ({} if model is None else {"model": model}), timeout=timeout_s)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["text"], tuple(round(value, 3) for value in choice["logprobs"]["token_logprobs"])


def load(http, name, path, **fields):
    return http.post(LOAD, json={"lora_name": name, "lora_path": str(path)} | fields)


def unload(http, name):
    return http.post(UNLOAD, json={"lora_name": name})


def listed(http):
    return {card["id"]: card for card in http.get("/v1/models").json()["data"]}


@contextmanager
def loaded(http, **adapters: str) -> Iterator[None]:
    for name, path in adapters.items():
        answer = load(http, name, path)
        assert answer.status_code == 200, answer.text
        assert answer.text == f"Success: LoRA adapter '{name}' added successfully."
    try:
        yield
    finally:  # what one test leaves would fail the next
        answers = [unload(http, name) for name in adapters]
    assert [answer.status_code for answer in answers] == [200] * len(adapters)


def test_an_adapter_is_there_once_loaded_and_gone_once_unloaded(http, folders):
    base = ask(http)
    assert set(listed(http)) == {"tiny"}
    with loaded(http, mine="one"):
        card = listed(http)["mine"]
        assert (card["root"], card["parent"]) == (str(folders / "root" / "one"), "tiny")
        assert ask(http, "mine") == ask(http, lora="mine") != base
    assert set(listed(http)) == {"tiny"}
    answer = http.post("/v1/completions", json={"model": "mine", "prompt": "x", "max_tokens": 1})
    assert answer.status_code == 404
    assert ask(http) == base


def test_a_name_reloaded_in_place_answers_with_the_new_weights_at_once(http):
    """The old answer's blocks are in the prefix cache and its weights in a slot: neither may be used again."""
    with loaded(http, first="one", second="two"):
        one, two = ask(http, "first"), ask(http, "second")
        assert one != two
        again = load(http, "first", "two")
        assert again.status_code == 400
        assert "loaded already" in again.json()["error"]["message"]
        assert again.json()["error"]["param"] == "lora_name"
        assert ask(http, "first") == one
        assert load(http, "first", "two", load_inplace=True).status_code == 200
        assert ask(http, "first") == two
        assert load(http, "first", "one", load_inplace=True).status_code == 200
        assert ask(http, "first") == one


def test_a_request_that_runs_keeps_its_weights_when_the_name_is_replaced(http):
    with loaded(http, name="one", other="two"):
        expected = ask(http, "name", max_tokens=120)[0]
        body = {"model": "name", "prompt": PROMPT, "max_tokens": 120, "temperature": 0, "ignore_eos": True}
        with httpx.stream("POST", f"{http.base_url}/v1/completions", json=body | {"stream": True}) as stream:
            lines = stream.iter_lines()
            first = next(line for line in lines if line)
            assert unload(http, "name").status_code == 409
            assert load(http, "name", "two", load_inplace=True).status_code == 200
            assert ask(http, "name") == ask(http, "other")
            events = [first, *(line for line in lines if line)]
        text = "".join(httpx.Response(200, text=e[6:]).json()["choices"][0]["text"] for e in events[:-1])
        assert text == expected


def test_an_adapter_in_use_is_not_unloaded_and_says_so(http):
    with loaded(http, busy="three"):
        body = {"model": "busy", "prompt": "x", "max_tokens": 240, "ignore_eos": True, "stream": True, "n": 32}
        with httpx.stream("POST", f"{http.base_url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # held: when it goes, httpx hangs up
            next(lines)
            answer = unload(http, "busy")
            assert answer.status_code == 409
            error = answer.json()["error"]
            assert error["message"] == "adapter 'busy' is in use by 32 live requests; unload it when they have ended"
            assert (error["code"], error["param"]) == ("adapter_in_use", "lora_name")
        while unload(http, "busy").status_code == 409:  # the disconnect is on its way
            pass
        assert load(http, "busy", "three").status_code == 200


def test_fifty_bad_loads_of_different_kinds_change_no_other_request(http, folders):
    bad = bad_adapters.make_all(folders / "root" / "one", folders / "root")
    assert len(bad) >= 50
    with loaded(http, one="one", two="two", three="three"):
        names = ("one", "two", "three", None)
        expected = {name: ask(http, name) for name in names}
        stop, wrong, num_answers = threading.Event(), [], 0

        def traffic(number):
            nonlocal num_answers
            with httpx.Client(base_url=http.base_url, timeout=60) as client:
                while not stop.is_set():
                    name = names[number % len(names)]
                    if (answer := ask(client, name)) != expected[name]:
                        wrong.append((name, answer))
                    number += 1
                    num_answers += 1

        clients = [threading.Thread(target=traffic, args=(number,)) for number in range(4)]
        for client in clients:
            client.start()
        try:
            for number, (kind, (folder, text)) in enumerate(bad.items()):
                # A new name, a name in use, a name in use that is to be replaced.
                name, fields = (("new", {}), ("one", {}), ("two", {"load_inplace": True}))[number % 3]
                before = num_answers
                answer = load(http, name, folder.name, **fields)
                assert answer.status_code in (400, 404), (kind, answer.text)
                message = answer.json()["error"]["message"]
                assert ("loaded already" if name == "one" else text) in message or answer.status_code == 404, kind
                while num_answers == before and any(client.is_alive() for client in clients):
                    time.sleep(0.002)  # so that every load has met traffic
        finally:
            stop.set()
            for client in clients:
                client.join(60)
        assert wrong == []
        assert num_answers >= len(bad)
        assert set(listed(http)) == {"tiny", "one", "two", "three"}
        assert {name: ask(http, name) for name in names} == expected
    assert ask(http) == expected[None]


def test_clients_that_hang_up_or_run_out_of_time_leave_nothing(http):
    """Two hundred of them, at any moment, some with four choices, while the others are answered."""
    with loaded(http, one="one", two="two", three="three"):
        expected = {name: ask(http, name) for name in ("one", "two", "three")}
        wrong = []

        def client(seed):
            rng = random.Random(seed)
            with httpx.Client(base_url=http.base_url) as own:
                for _ in range(25):
                    name = rng.choice(["one", "two", "three"])
                    body = {"model": name, "prompt": f"{rng.random()} {PROMPT}", "max_tokens": 150, "ignore_eos": True}
                    body |= {"n": rng.choice([1, 4]), "stream": rng.random() < 0.5}
                    with contextlib.suppress(httpx.TimeoutException):
                        own.post("/v1/completions", json=body, timeout=rng.choice([0.002, 0.02, 0.1]))
                    if rng.random() < 0.2 and ask(own, name, timeout_s=60) != expected[name]:
                        wrong.append(name)

        clients = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
        for each in clients:
            each.start()
        for each in clients:
            each.join(120)
        assert wrong == []
        deadline = time.monotonic() + 30
        while any(unload(http, name).status_code == 409 for name in expected):  # a hold left would be one for ever
            assert time.monotonic() < deadline, "an adapter is still in use"
            time.sleep(0.05)
        for name in expected:
            assert load(http, name, name).status_code in (200, 400)
        while "izh:kv_cache_usage_perc" not in (lines := http.get("/metrics").text) or not re.search(
            r'izh:kv_cache_usage_perc\{model_name="tiny"\} 0\.0\n', lines
        ):
            assert time.monotonic() < deadline, "blocks are still held"
            ask(http)  # the gauge is told with a step


@pytest.mark.parametrize(
    ("body", "status", "param", "text"),
    [
        ({"lora_name": "x", "lora_path": "../outside"}, 400, "lora_path", "must lie in the server's --lora-root"),
        ({"lora_name": "x", "lora_path": "link"}, 400, "lora_path", "must lie in the server's --lora-root"),
        ({"lora_name": "x", "lora_path": "/etc"}, 400, "lora_path", "must lie in the server's --lora-root"),
        ({"lora_name": "x", "lora_path": "one/../../outside"}, 400, "lora_path", "must lie in"),
        ({"lora_name": "x", "lora_path": "missing"}, 404, "lora_path", "holds no adapter"),
        ({"lora_name": "x", "lora_path": ""}, 404, "lora_path", "holds no adapter"),
        ({"lora_name": "x", "lora_path": "one/adapter_config.json"}, 404, "lora_path", "holds no adapter"),
        ({"lora_name": "x", "lora_path": "one\0"}, 400, "lora_path", "no path"),
        ({"lora_name": "x", "lora_path": "a" * 5000}, 400, "lora_path", "no path"),
        ({"lora_name": "x"}, 400, "lora_path", "required"),
        ({"lora_path": "one"}, 400, "lora_name", "required"),
        ({"lora_name": 3, "lora_path": "one"}, 400, "lora_name", "string"),
        ({"lora_name": "", "lora_path": "one"}, 400, None, "printable"),
        ({"lora_name": "a\nb", "lora_path": "one"}, 400, None, "printable"),
        ({"lora_name": "tiny", "lora_path": "one"}, 400, None, "base model's name"),
        ({"lora_name": "x", "lora_path": "one", "load_inplace": "yes"}, 400, "load_inplace", "boolean"),
        ({"lora_name": "x", "lora_path": "one", "slot": 1}, 400, "slot", "not a field"),
    ],
)
def test_what_cannot_be_loaded_is_said(http, body, status, param, text):
    answer = http.post(LOAD, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert text in error["message"]
    assert error["param"] == param
    assert set(listed(http)) == {"tiny"}


def test_an_absolute_path_inside_the_root_is_allowed(http, folders):
    with loaded(http, absolute=folders / "root" / "one"):
        ask(http, "absolute")


def test_an_unknown_name_cannot_be_unloaded(http):
    answer = unload(http, "nobody")
    assert answer.status_code == 404
    assert "adapter 'nobody' is not loaded here" in answer.json()["error"]["message"]


def test_without_the_option_nothing_can_be_loaded(url, tmp_path: Path):
    with httpx.Client(base_url=url) as client:
        for answer in (load(client, "x", tmp_path), unload(client, "x")):
            assert answer.status_code == 404
            assert "--allow-runtime-lora --lora-root DIR" in answer.json()["error"]["message"]
