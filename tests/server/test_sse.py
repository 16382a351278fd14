"""Answers that take time: framing, errors before and after the first event, and clients that leave."""

import asyncio
import json

import pytest
from asgi import Exchange, client, until
from fake_engine import FakeEngine

from izh.errors import EngineDeadError, IzhError, RequestError
from izh.outputs import CompletionOutput
from izh.server.app import Server
from izh.server.sse import merge

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {CHAT: {"messages": [{"role": "user", "content": "hello"}]}, TEXT: {"prompt": "hello"}}
BOTH = pytest.mark.parametrize("route", [CHAT, TEXT])


def events(body: bytes) -> list:
    """The stream's data, each line decoded; fails on anything that is no well-formed event."""
    *frames, last = body.decode().split("\n\n")
    assert last == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    data = [frame.removeprefix("data: ") for frame in frames]
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


@BOTH
async def test_a_stream_is_server_sent_events(route):
    async with client(FakeEngine()) as http:
        answer = await http.post(route, json=BODIES[route] | {"stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in answer.headers
    choices = [choice for event in events(answer.content) for choice in event["choices"]]
    texts = [c["text"] if route == TEXT else c["delta"].get("content", "") for c in choices]
    assert "".join(texts) == "hello world"
    assert [c["finish_reason"] for c in choices][-1] == "stop"


@BOTH
async def test_each_token_is_sent_when_it_exists(route):
    go = asyncio.Event()

    async def slow(_prompt, _params):
        yield CompletionOutput(0, "first", [5])
        await go.wait()
        yield CompletionOutput(0, "second", [6], finish_reason="stop")

    exchange = Exchange(Server(FakeEngine(slow)).app, route, BODIES[route] | {"stream": True})
    await until(lambda: b"first" in exchange.body)
    assert b"second" not in exchange.body
    go.set()
    await exchange.end()
    assert b"second" in exchange.body
    assert exchange.sent[-1]["more_body"] is False


@BOTH
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RequestError("top_p is odd", "top_p"), 400, "top_p is odd"),
        (EngineDeadError("it died"), 503, "it died"),
        (IzhError("the step failed"), 500, "the step failed"),
        (RuntimeError("a secret"), 500, "internal error"),
    ],
)
async def test_an_error_before_the_first_token_is_the_status(route, stream, error, status, message):
    async def fail(_prompt, _params):
        raise error
        yield

    async with client(FakeEngine(fail)) as http:
        answer = await http.post(route, json=BODIES[route] | {"stream": stream})
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == message
    assert "secret" not in answer.text


@BOTH
@pytest.mark.parametrize(("error", "message"), [(IzhError("it broke"), "it broke"), (KeyError("a secret"), "internal")])
async def test_a_later_error_is_an_event_of_its_own(route, error, message):
    async def fail(_prompt, _params):
        yield CompletionOutput(0, "hello", [5])
        raise error

    async with client(FakeEngine(fail)) as http:
        answer = await http.post(route, json=BODIES[route] | {"stream": True})
    assert answer.status_code == 200
    *_, last = events(answer.content)
    assert message in last["error"]["message"]
    assert "secret" not in answer.text


@BOTH
async def test_an_aborted_choice_is_no_answer(route):
    async def abort(_prompt, _params):
        yield CompletionOutput(0, "hel", [5], finish_reason="abort")

    async with client(FakeEngine(abort)) as http:
        answer = await http.post(route, json=BODIES[route])
    assert answer.status_code == 500
    assert "ended early" in answer.json()["error"]["message"]


async def never(_prompt, _params):
    await asyncio.Event().wait()
    yield


async def one_then_never(_prompt, _params):
    yield CompletionOutput(0, "first", [5])
    await asyncio.Event().wait()


@BOTH
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [never, one_then_never])
async def test_a_client_that_leaves_ends_its_request(route, stream, script):
    engine = FakeEngine(script)
    exchange = Exchange(Server(engine).app, route, BODIES[route] | {"stream": stream})
    if stream and script is one_then_never:
        await until(lambda: b"first" in exchange.body)
    else:
        await until(lambda: engine.num_live == 1)
    exchange.leave()
    await exchange.end()
    assert engine.num_live == 0
    assert exchange.status == (200 if stream and script is one_then_never else 499)


@pytest.mark.parametrize("stream", [False, True])
async def test_all_prompts_of_a_list_end_with_it(stream):
    engine = FakeEngine(one_then_never)
    body = {"prompt": ["a", "b", "c"], "stream": stream}
    exchange = Exchange(Server(engine).app, TEXT, body)
    await until(lambda: engine.num_live == 3)
    exchange.leave()
    await exchange.end()
    assert engine.num_live == 0


async def test_one_failing_prompt_ends_the_others():
    async def script(prompt, _params):
        if prompt == [7]:
            raise RequestError("seven is bad", "prompt")
        await asyncio.Event().wait()
        yield

    engine = FakeEngine(script)
    async with client(engine) as http:
        answer = await http.post(TEXT, json={"prompt": [[5], [7], [9]], "stream": True})
    assert answer.status_code == 400
    assert engine.num_live == 0


async def test_merge_interleaves_and_keeps_the_order_within_each():
    async def count(start):
        for i in range(3):
            await asyncio.sleep(0)
            yield start + i

    got = [item async for item in merge([count(0), count(10)])]
    assert [item for index, item in got if index == 0] == [0, 1, 2]
    assert [item for index, item in got if index == 1] == [10, 11, 12]
    assert [index for index, _ in got][:4] == [0, 1, 0, 1]
