"""Whatever a client sends, it gets an error that says what is wrong, and the server goes on."""

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]

BAD = [
    # route, body, param, what the message says
    (CHAT, {}, "messages", "messages is required"),
    (CHAT, {"messages": []}, "messages", "at least one message"),
    (CHAT, {"messages": "hello"}, "messages", "list"),
    (CHAT, {"messages": [{"content": "hello"}]}, "messages", "messages[0].role must be a string"),
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
    error = check_shape(http.post(route, json=body), 400)
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
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "user": "me",
        "stop": None,
        "logit_bias": {},
        "best_of": None,
        "service_tier": "auto",
    }
    assert http.post(CHAT, json={"messages": HELLO, "max_tokens": 2} | inert).status_code == 200
