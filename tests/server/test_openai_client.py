"""The real `openai` client drives the real server."""

import asyncio
import time

import openai
import pytest

GREEDY = {"model": "tiny", "temperature": 0.0, "extra_body": {"ignore_eos": True}}
HELLO = [{"role": "user", "content": "hello world"}]


def metric(http, name):
    line = next(line for line in http.get("/metrics").text.splitlines() if line.startswith(f"izh:{name}"))
    return float(line.rpartition(" ")[2])


def wait_until(condition, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_chat(client):
    answer = client.chat.completions.create(messages=HELLO, max_tokens=8, **GREEDY)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_a_streamed_chat_adds_up_to_the_whole_one(client):
    whole = client.chat.completions.create(messages=HELLO, max_tokens=24, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            messages=HELLO, max_tokens=24, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]].count("length") == 1
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_a_stream_without_usage_ends_with_the_finish_reason(client):
    chunks = list(client.chat.completions.create(messages=HELLO, max_tokens=4, stream=True, **GREEDY))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_n_choices_differ_and_repeat_with_the_seed(client):
    def ask(**options):
        return client.chat.completions.create(
            model="tiny", messages=HELLO, n=3, seed=5, max_tokens=12, extra_body={"ignore_eos": True}, **options
        )

    first, again = ask(), ask()
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert first.usage.completion_tokens == 36
    streamed = ["", "", ""]
    for chunk in ask(stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_chat_logprobs(client):
    answer = client.chat.completions.create(messages=HELLO, max_tokens=6, logprobs=True, top_logprobs=4, **GREEDY)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 6
    for entry in entries:
        assert len(entry.top_logprobs) == 4
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0.0
        assert entry.bytes
    raw = b"".join(bytes(entry.bytes) for entry in entries)
    assert raw.decode("utf-8", "replace") == answer.choices[0].message.content


def test_a_stop_string_ends_the_answer_before_it(client):
    whole = client.chat.completions.create(messages=HELLO, max_tokens=40, **GREEDY).choices[0].message.content
    stop = whole[5:8]
    for stream in (False, True):
        answer = client.chat.completions.create(messages=HELLO, max_tokens=40, stop=[stop], stream=stream, **GREEDY)
        if stream:
            chunks = list(answer)
            text = "".join(c.choices[0].delta.content or "" for c in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert text == whole[: whole.index(stop)]
        assert reason == "stop"


def test_completions_of_text_ids_and_lists(client, http):
    ids = http.post("/tokenize", json={"prompt": "the quick"}).json()["tokens"]
    by_text = client.completions.create(prompt="the quick", max_tokens=8, **GREEDY)
    by_ids = client.completions.create(prompt=ids, max_tokens=8, **GREEDY)
    assert by_text.choices[0].text == by_ids.choices[0].text
    several = client.completions.create(prompt=["the quick", "hello"], n=2, max_tokens=8, **GREEDY)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == by_text.choices[0].text
    assert several.usage.completion_tokens == 32
    lists = client.completions.create(prompt=[ids, ids], max_tokens=8, **GREEDY)
    assert [choice.text for choice in lists.choices] == [by_text.choices[0].text] * 2


def test_a_streamed_completion_adds_up(client):
    whole = client.completions.create(prompt=["the quick", "hello"], max_tokens=16, logprobs=1, **GREEDY)
    texts, tokens, offsets = ["", ""], [[], []], [[], []]
    for chunk in client.completions.create(
        prompt=["the quick", "hello"], max_tokens=16, logprobs=1, stream=True, **GREEDY
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]


def test_echo_with_logprobs_scores_the_prompt(client):
    answer = client.completions.create(prompt="the quick brown", echo=True, logprobs=2, max_tokens=3, **GREEDY)
    choice = answer.choices[0]
    assert choice.text.startswith("the quick brown")
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert len(choice.logprobs.tokens) == answer.usage.total_tokens
    assert choice.logprobs.text_offset[0] == 0
    only = client.completions.create(prompt="the quick brown", echo=True, logprobs=2, max_tokens=0, **GREEDY)
    assert only.choices[0].text == "the quick brown"
    assert only.usage.completion_tokens == 0
    count = answer.usage.prompt_tokens
    assert only.choices[0].logprobs.token_logprobs[1:] == pytest.approx(
        choice.logprobs.token_logprobs[1:count], abs=1e-4
    )


def test_an_echo_is_the_prompt_as_it_was_sent(client, http):
    prompt = "<|im_start|>für 日本 🙂"
    for given in (prompt, http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]):
        for n in (1, 2):
            answer = client.completions.create(prompt=given, echo=True, n=n, max_tokens=3, **GREEDY)
            assert all(choice.text.startswith(prompt) for choice in answer.choices)
            texts = [""] * n
            for chunk in client.completions.create(
                prompt=given, echo=True, n=n, max_tokens=3, logprobs=1, stream=True, **GREEDY
            ):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
            assert texts == [choice.text for choice in answer.choices]


def test_prompt_logprobs(client, http):
    more = {"extra_body": {"prompt_logprobs": 2, "ignore_eos": True}}
    text = client.completions.create(prompt="the quick brown", max_tokens=1, **(GREEDY | more))
    chat = client.chat.completions.create(messages=HELLO, max_tokens=1, **(GREEDY | more))
    for entries, usage in ((text.choices[0].prompt_logprobs, text.usage), (chat.prompt_logprobs, chat.usage)):
        assert entries[0] is None
        assert len(entries) == usage.prompt_tokens
        assert all(2 <= len(entry) <= 3 for entry in entries[1:])
    scored = client.completions.create(prompt="the quick brown", echo=True, logprobs=0, max_tokens=0, **GREEDY)
    ids = http.post("/tokenize", json={"prompt": "the quick brown"}).json()["tokens"]
    for token, entry, value in zip(
        ids[1:], text.choices[0].prompt_logprobs[1:], scored.choices[0].logprobs.token_logprobs[1:], strict=True
    ):
        assert entry[str(token)]["logprob"] == pytest.approx(value, abs=1e-4)


def test_tokenize_and_back(http):
    prompt = "für 日本 <|im_start|>🙂"
    answer = http.post("/tokenize", json={"prompt": prompt, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 256
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": prompt}
    chat = http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": chat}).json()["prompt"]
    assert text == "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"


def test_a_final_message_can_be_continued(http):
    messages = [*HELLO, {"role": "assistant", "content": "the quick"}]
    tokens = http.post("/tokenize", json={"messages": messages, "continue_final_message": True}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"].endswith("assistant\nthe quick")


def test_a_repeated_prompt_reports_cached_tokens(client):
    ask = {"prompt": "the quick brown fox jumps over the lazy dog " * 3, "max_tokens": 1} | GREEDY
    client.completions.create(**ask)
    assert client.completions.create(**ask).usage.prompt_tokens_details.cached_tokens >= 16
    salted = ask | {"extra_body": {"cache_salt": "tenant", "ignore_eos": True}}
    assert client.completions.create(**salted).usage.prompt_tokens_details.cached_tokens == 0


def test_closing_a_stream_gives_its_kv_back(client, http):
    stream = client.chat.completions.create(messages=HELLO, max_tokens=200, stream=True, **GREEDY)
    next(iter(stream))
    stream.close()
    wait_until(lambda: metric(http, "num_requests_running") == 0)
    client.chat.completions.create(messages=HELLO, max_tokens=2, **GREEDY)
    assert metric(http, "kv_cache_usage_perc") == 0.0


def test_a_client_that_leaves_without_a_stream_cancels_too(url, http):
    async def leave():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            tasks = [
                asyncio.create_task(client.completions.create(prompt=f"hello {i}", max_tokens=200, n=4, **GREEDY))
                for i in range(8)
            ]
            await asyncio.sleep(0.3)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    wait_until(lambda: metric(http, "num_requests_running") + metric(http, "num_requests_waiting") == 0)


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "izh")
    assert model.max_model_len == 256
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; served: 'tiny'"):
        client.models.retrieve("other")


def test_many_clients_at_once_get_the_answers_they_get_alone(url):
    async def ask(client, i):
        answer = await client.completions.create(prompt=f"hello {i} dog", max_tokens=12, **GREEDY)
        return answer.choices[0].text

    async def both():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*(ask(client, i) for i in range(40)))
            return together, [await ask(client, i) for i in range(40)]

    together, alone = asyncio.run(both())
    assert together == alone
