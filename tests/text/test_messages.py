"""Chat messages in the templates' form."""

import pytest

from izh.errors import RequestError
from izh.text.messages import template_messages


def test_text_parts_are_joined_and_nothing_else_is_lost() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "name": "ann", "content": parts, "reasoning": "r", "tool_calls": None}]
    assert template_messages(messages) == [{"role": "user", "name": "ann", "content": "one\ntwo", "reasoning": "r"}]
    assert messages[0]["content"] is parts


def test_absent_content_stays_absent() -> None:
    assert template_messages([{"role": "assistant", "content": None}]) == [{"role": "assistant"}]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [('{"x": 1}', {"x": 1}), ("", {}), ("[1]", "[1]"), ("not json", "not json")],
)
def test_tool_call_arguments(text: str, arguments: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    (message,) = template_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {}}, {"type": "text"}, "text", None])
def test_other_parts_are_refused(part: object) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [part]}]
    with pytest.raises(RequestError) as caught:
        template_messages(messages)
    assert caught.value.param == "messages[1].content[0]"
