"""Answers in the terminal, with an LLM that says what it is told to."""

import builtins
import os
import signal
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from izh.cli.options import AnswerOptions
from izh.cli.terminal import Conversation, answer_once, talk
from izh.errors import ContextLengthError, RequestError
from izh.outputs import CompletionOutput, RequestOutput
from izh.request import SamplingParams


class Scribe:
    """A tokenizer whose ids are characters; a conversation is written as 'role:content;'."""

    def __init__(self, has_chat_template: bool) -> None:
        self.has_chat_template = has_chat_template

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.encode("".join(f"{m['role']}:{m['content']};" for m in messages))


class ScriptedLLM:
    """Answers word by word from a script; notes what it was asked and whether an answer was stopped."""

    def __init__(self, *answers: list[str] | RequestError, has_chat_template: bool = True, max_model_len: int = 1000):
        self.tokenizer = Scribe(has_chat_template)
        self.max_model_len = max_model_len
        self.asked: list[str] = []
        self.params: list[SamplingParams] = []
        self.num_told: list[int] = []
        self.before_word: Callable[[int], None] = lambda _index: None
        self._answers: Iterator[list[str] | RequestError] = iter(answers)

    def stream(self, prompt: list[int], params: SamplingParams) -> Generator[RequestOutput, None, None]:
        self.asked.append("".join(map(chr, prompt)))
        self.params.append(params)
        self.num_told.append(0)
        answer = next(self._answers)
        if isinstance(answer, RequestError):
            raise answer
        for index, word in enumerate(answer):
            self.before_word(index)
            self.num_told[-1] += 1
            yield RequestOutput("id", prompt, [CompletionOutput(0, word, [index])])


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """What a person types; then the end of the input."""
    pending = iter(lines)

    def read(_prompt: str) -> str:
        line = next(pending, None)
        if line is None:
            raise EOFError
        if line == "^C":
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr(builtins, "input", read)


def press_ctrl_c(at_word: int) -> Callable[[int], None]:
    return lambda index: os.kill(os.getpid(), signal.SIGINT) if index == at_word else None


def test_run_uses_the_chat_template(capsys: pytest.CaptureFixture[str]) -> None:
    llm = ScriptedLLM(["Hello", " you"])
    assert answer_once(llm, "Hi", AnswerOptions(system="Be brief."), raw=False) == 0
    assert llm.asked == ["system:Be brief.;user:Hi;"]
    assert capsys.readouterr().out == "Hello you\n"


def test_run_raw_and_without_a_template() -> None:
    llm = ScriptedLLM(["x"])
    answer_once(llm, "Hi", AnswerOptions(), raw=True)
    assert llm.asked == ["Hi"]
    llm = ScriptedLLM(["x"], has_chat_template=False)
    answer_once(llm, "Hi", AnswerOptions(), raw=False)
    assert llm.asked == ["Hi"]
    with pytest.raises(RequestError, match="--system needs a chat template"):
        answer_once(llm, "Hi", AnswerOptions(system="Be brief."), raw=False)


def test_options_become_params() -> None:
    llm = ScriptedLLM(["x"], ["x"], max_model_len=100)
    options = AnswerOptions(max_tokens=98, temperature=0.0, top_p=0.5, top_k=3, seed=4, stop=("a", "b"))
    answer_once(llm, "Hi", options, raw=True)
    (params,) = llm.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (98, 0.0, 0.5, 3)
    assert (params.seed, params.stop) == (4, ("a", "b"))
    answer_once(llm, "Hi!", options, raw=True)
    assert llm.params[1].max_tokens is None, "97 tokens of room: up to the context's end instead of a refusal"


def test_ctrl_c_ends_a_single_answer(capsys: pytest.CaptureFixture[str]) -> None:
    llm = ScriptedLLM(["one", " two", " three"])
    llm.before_word = press_ctrl_c(1)
    handler = signal.getsignal(signal.SIGINT)
    assert answer_once(llm, "Hi", AnswerOptions(), raw=True) == 130
    assert capsys.readouterr().out == "one two\n", "the step in which it came is finished and shown"
    assert llm.num_told == [2]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_does_not_wait() -> None:
    def press_twice(index: int) -> None:
        if index == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    llm = ScriptedLLM(["one", " two"])
    llm.before_word = press_twice
    with pytest.raises(KeyboardInterrupt):
        answer_once(llm, "Hi", AnswerOptions(), raw=True)


def test_a_conversation_remembers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = ScriptedLLM(["Hello"], ["Bye"], ["Again"])
    type_in(monkeypatch, "Hi", "", "So?", "/clear", "New")
    assert talk(Conversation(llm, AnswerOptions(system="S"))) == 0
    assert llm.asked == [
        "system:S;user:Hi;",
        "system:S;user:Hi;assistant:Hello;user:So?;",
        "system:S;user:New;",
    ]
    assert capsys.readouterr().out == "Hello\nBye\nAgain\n\n"


def test_ctrl_c_ends_an_answer_and_not_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM(["one", " two", " three"], ["four"])
    llm.before_word = press_ctrl_c(0)
    type_in(monkeypatch, "^C", "Count", "Go on")
    talk(Conversation(llm, AnswerOptions()))
    assert llm.num_told == [1, 1]
    assert llm.asked[1] == "user:Count;assistant:one;user:Go on;", "what was said so far stays said"


def test_exit_and_unknown_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = ScriptedLLM()
    type_in(monkeypatch, "/quit", "/exit", "never read")
    assert talk(Conversation(llm, AnswerOptions())) == 0
    assert llm.asked == []
    assert "unknown command /quit" in capsys.readouterr().err


def test_a_refused_question_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(ContextLengthError("too long"), ["fine"])
    type_in(monkeypatch, "very long", "short")
    talk(Conversation(llm, AnswerOptions()))
    assert llm.asked[1] == "user:short;"
    assert "izh: too long (/clear" in capsys.readouterr().err


def test_a_model_without_a_template_cannot_chat() -> None:
    with pytest.raises(RequestError, match="izh run --raw"):
        Conversation(ScriptedLLM(has_chat_template=False), AnswerOptions())
