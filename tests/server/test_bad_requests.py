"""Whatever a client sends, it gets an error that says what is wrong, and the server goes on."""

import json
import math

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HALF = "\ud800"  # half of a surrogate pair: JSON can spell it, UTF-8 cannot

BAD = [
    # route, body, param, what the message says
    (CHAT, {}, "messages", "messages is required"),
    (CHAT, {"messages": []}, "messages", "at least one message"),
    (CHAT, {"messages": "hello"}, "messages", "list"),
    (CHAT, {"messages": [{"content": "hello"}]}, "messages", "messages[0].role is required"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages", "messages[0].content"),
    (CHAT, {"messages": IMAGE}, "messages[0].content[0]", "image_url"),
    (CHAT, {"messages": HELLO, "temperature": "hot"}, "temperature", "'hot'"),
    (CHAT, {"messages": HELLO, "temperature": -1}, "temperature", "temperature must be between 0 and 100, got -1"),
    (CHAT, {"messages": HELLO, "top_p": 0}, "top_p", "above 0"),
    (CHAT, {"messages": HELLO, "top_k": -2}, "top_k", "at least 0"),
    (CHAT, {"messages": HELLO, "n": 0}, "n", "between 1 and 128"),
    (CHAT, {"messages": HELLO, "n": True}, "n", "integer"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens", "at least 1"),
    (CHAT, {"messages": HELLO, "presence_penalty": 3}, "presence_penalty", "between -2 and 2"),
    (CHAT, {"messages": HELLO, "repetition_penalty": 0}, "repetition_penalty", "above 0"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20, got 21"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "only allowed when logprobs is true"),
    (CHAT, {"messages": HELLO, "logit_bias": {"the": 1}}, "logit_bias", "'the'"),
    (CHAT, {"messages": HELLO, "logit_bias": {"3": 101}}, "logit_bias", "between -100 and 100"),
    (CHAT, {"messages": HELLO, "logit_bias": {"999999": 1}}, "logit_bias", "999999"),
    (CHAT, {"messages": HELLO, "stop": [""]}, "stop", "non-empty"),
    (CHAT, {"messages": HELLO, "stop": 3}, "stop", "string or a list of strings"),
    (CHAT, {"messages": HELLO, "stop_token_ids": [10**7]}, "stop_token_ids", "10000000"),
    (CHAT, {"messages": HELLO, "seed": 2**70}, "seed", "64-bit"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools", "tools is not implemented"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format", "not implemented"),
    (CHAT, {"messages": HELLO, "best_of": 2}, "best_of", "best_of is not implemented"),
    (CHAT, {"messages": HELLO, "use_beam_search": True}, "use_beam_search", "use_beam_search is not a field"),
    (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options", "when stream is true"),
    (CHAT, {"messages": HELLO, "max_tokens": 256}, "max_tokens", "max_tokens 256 exceeds the context of 256"),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 300}]}, "prompt", "exceeds the context of 256"),
    (CHAT, {"messages": HELLO, "cache_salt": ""}, "cache_salt", "must not be empty"),
    (CHAT, {"messages": HELLO, "min_tokens": 9, "max_tokens": 3}, "min_tokens", "at most max_tokens (3)"),
    (CHAT, {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": 1}, None, "boolean"),
    (TEXT, {}, "prompt", "prompt is required"),
    (TEXT, {"prompt": []}, "prompt", "must not be an empty list"),
    (TEXT, {"prompt": ""}, "prompt", "the prompt is empty"),
    (TEXT, {"prompt": [1, "a"]}, "prompt", "list of token ids"),
    (TEXT, {"prompt": [[]]}, "prompt", "the prompt is empty"),
    (TEXT, {"prompt": [10**9]}, "prompt", "token id 1000000000"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "suffix", "suffix is not implemented"),
    (TEXT, {"prompt": "x", "best_of": 3}, "best_of", "best_of is not implemented"),
    (TEXT, {"prompt": "x", "logprobs": 50}, "logprobs", "between 0 and 20"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
    (CHAT, {"messages": [{"role": "banana", "content": "x"}]}, "messages[0].role", "got 'banana'"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0]", "must have content"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0]", "must have content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "weight": 0}]},
        "messages[0].weight",
        "weight is not a field",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0]", "of the assistant"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function", "required"),
    (CHAT, {"messages": [7]}, "messages[0]", "messages[0] must be an object, got 7"),
    (CHAT, {"messages": HELLO, "max_token": 5}, "max_token", "did you mean max_tokens?"),
    (CHAT, {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 2}, "max_completion_tokens", "(3)"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens", "got 0"),
    (CHAT, {"messages": HELLO, "user": 5}, "user", "user must be a string, got 5"),
    (CHAT, {"messages": HELLO, "metadata": {"a": "b"}}, "metadata", "metadata is not implemented: nothing is stored"),
    (CHAT, {"messages": HELLO, "modalities": ["text", "audio"]}, "modalities", "modalities is not implemented"),
    (CHAT, {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True}, "continue", "both"),
    (
        CHAT,
        {"messages": HELLO, "chat_template_kwargs": {"messages": 1}},
        "chat_template_kwargs",
        "may not set messages",
    ),
    (TEXT, {"prompt": None}, "prompt", "prompt is required"),
    (TEXT, {"prompt": HALF}, "prompt", "valid Unicode"),
    (TEXT, {"prompt": ["x", HALF]}, "prompt", "valid Unicode"),
    (TEXT, {"prompt": "x", "stop": HALF}, "stop", "valid Unicode"),
    (TEXT, {"prompt": "x", "cache_salt": HALF}, "cache_salt", "valid Unicode"),
    (TEXT, {"prompt": "x", HALF: 1}, None, "is not a field"),
    (TEXT, {"prompt": [2**70]}, "prompt", "list of token ids"),
    (TEXT, {"prompt": "x", "max_tokens": 2**70}, "max_tokens", "less than 2147483648"),
    (TEXT, {"prompt": "x", "priority": -(2**70)}, "priority", "at least -2147483648"),
    (TEXT, {"prompt": "x", "top_k": 2**40}, "top_k", "less than"),
    (TEXT, {"prompt": "x", "temperature": math.nan}, "temperature", "got nan"),
    (TEXT, {"prompt": "x", "logit_bias": {"--5": 1}}, "logit_bias", "'--5'"),
    (TEXT, {"prompt": "x", "logit_bias": {str(2**70): 1}}, "logit_bias", str(2**70)),
    (TEXT, {"prompt": ["x"] * 600, "n": 2}, "prompt", "at most 1024 choices, got 600 prompts times n 2"),
    ("/tokenize", {"prompt": HALF}, "prompt", "valid Unicode"),
    ("/tokenize", {}, "prompt", "exactly one of prompt and messages"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "id -1"),
]


def check_shape(answer, status):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


STREAMED = [
    (route, body | {"stream": True}, param, text)
    for route, body, param, text in BAD
    if route in (CHAT, TEXT) and "stream_options" not in body
]


@pytest.mark.parametrize(("route", "body", "param", "text"), BAD + STREAMED)
def test_a_bad_request_is_a_400_that_names_the_field(http, route, body, param, text):
    # httpx would refuse to send NaN.
    answer = http.post(route, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = check_shape(answer, 400)
    assert text in error["message"]
    if param is not None:
        assert error["param"].startswith(param)


def test_context_overflow_has_its_code_and_the_three_numbers(http):
    error = check_shape(http.post(TEXT, json={"prompt": [5] * 200, "max_tokens": 100}), 400)
    assert error["code"] == "context_length_exceeded"
    for number in ("200", "100", "256"):
        assert number in error["message"]


def test_broken_json_and_other_bodies(http):
    headers = {"Content-Type": "application/json"}
    assert "not valid JSON" in check_shape(http.post(CHAT, content=b"{oops", headers=headers), 400)["message"]
    check_shape(http.post(CHAT, content=b"\xff\xfe", headers=headers), 400)
    check_shape(http.post(CHAT, content=b"[1, 2]", headers=headers), 400)
    check_shape(http.post(CHAT, content=b"null", headers=headers), 400)
    check_shape(http.post(CHAT, content=b"", headers=headers), 400)


def test_other_statuses_have_the_same_shape(http):
    assert check_shape(http.post(CHAT, json={"model": "gpt-4", "messages": HELLO}), 404)["code"] == "model_not_found"
    check_shape(http.get("/v1/nothing"), 404)
    check_shape(http.get(CHAT), 405)
    error = check_shape(http.post(TEXT, json={"prompt": "x" * 300_000}), 413)
    assert "0.25 MiB" in error["message"]


def test_the_server_still_answers(http):
    assert http.get("/health").status_code == 200
    assert http.post(TEXT, json={"prompt": "hello", "max_tokens": 2}).status_code == 200


def test_values_without_effect_are_accepted(http):
    inert = {
        "temperature": None,
        "max_completion_tokens": None,
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "user": "me",
        "stop": None,
        "logit_bias": {},
        "best_of": None,
        "service_tier": "auto",
        "verbosity": "medium",
        "moderation": None,
        "prompt_cache_retention": None,
    }
    assert http.post(CHAT, json={"messages": HELLO, "max_tokens": 2} | inert).status_code == 200
    inert = {"echo": None, "suffix": "", "best_of": 1, "stream": None, "stream_options": None}
    assert http.post(TEXT, json={"prompt": "x", "max_tokens": 2} | inert).status_code == 200


def test_an_answer_can_be_handed_back_as_it_came(client):
    """Clients append `answer.choices[0].message`, nulls included, to the next conversation."""
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
    back = answer.choices[0].message.model_dump() | {"content": "hello"}
    again = client.chat.completions.create(model="tiny", messages=[*HELLO, back, *HELLO], max_tokens=2)
    assert again.usage.completion_tokens == 2


def test_parts_are_joined_and_developer_is_system(http):
    def tokens(*messages):
        return http.post("/tokenize", json={"messages": messages}).json()["tokens"]

    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    assert tokens({"role": "user", "content": parts}) == tokens({"role": "user", "content": "hello\nworld"})
    assert tokens({"role": "developer", "content": "x"}) == tokens({"role": "system", "content": "x"})
