"""Answers in the terminal: one prompt, or a conversation.

Owns: printing an answer as it grows, Ctrl-C, the turns of a conversation.
Must not know: flags, the engine behind LLM.
Invariant: Ctrl-C during an answer ends that answer between two steps, never in the middle of one.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import FrameType

from izh.cli.options import AnswerOptions
from izh.errors import RequestError
from izh.llm import LLM, Messages
from izh.request import SamplingParams

PROMPT = ">>> "
WELCOME = "Ctrl-C stops an answer; /clear forgets the conversation; /exit or Ctrl-D leaves."


def answer_once(llm: LLM, prompt: str, options: AnswerOptions, raw: bool) -> int:
    """Print the answer to one prompt. `raw` (or a model without a chat template) continues the prompt instead.

    Returns the exit status: 130 when interrupted.
    """
    if raw or not llm.tokenizer.has_chat_template:
        if options.system is not None:
            raise RequestError("--system needs a chat template: leave it out, or put its text into the prompt")
        prompt_ids = llm.tokenizer.encode(prompt)
    else:
        prompt_ids = llm.tokenizer.chat([*_opening(options), {"role": "user", "content": prompt}])
    with _interrupt() as is_interrupted:
        print_answer(llm, prompt_ids, options, is_interrupted)
        return 130 if is_interrupted() else 0


@dataclass
class Conversation:
    """The turns so far. `ask` adds the question and, as it grows, the answer."""

    llm: LLM
    options: AnswerOptions
    messages: Messages = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.llm.tokenizer.has_chat_template:
            raise RequestError("this model has no chat template: use 'izh run --raw PROMPT' instead")
        self.clear()

    def clear(self) -> None:
        """Back to the system message."""
        self.messages[:] = _opening(self.options)

    def ask(self, question: str, is_interrupted: Callable[[], bool]) -> None:
        """Print the answer and remember both. A question that cannot be answered is not remembered."""
        self.messages.append({"role": "user", "content": question})
        try:
            answer = print_answer(self.llm, self.llm.tokenizer.chat(self.messages), self.options, is_interrupted)
        except RequestError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer})


def talk(conversation: Conversation) -> int:
    """Read questions and answer them until /exit, or the end of the input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # importing it gives input() line editing and history

    print(WELCOME, file=sys.stderr)
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\n" + WELCOME, file=sys.stderr)
            continue
        if line == "/exit":
            return 0
        if line == "/clear":
            conversation.clear()
        elif line.startswith("/"):
            print(f"unknown command {line}. {WELCOME}", file=sys.stderr)
        elif line:
            try:
                with _interrupt() as is_interrupted:
                    conversation.ask(line, is_interrupted)
            except RequestError as error:
                print(f"izh: {error} (/clear forgets the conversation)", file=sys.stderr)


def print_answer(llm: LLM, prompt_ids: list[int], options: AnswerOptions, is_interrupted: Callable[[], bool]) -> str:
    """Print the answer as it grows, and its speed on stderr when a person is watching. Returns its text."""
    text, num_tokens, start = "", 0, time.monotonic()
    first_s: float | None = None
    with closing(llm.stream(prompt_ids, _params(options, llm.max_model_len - len(prompt_ids)))) as deltas:
        for delta in deltas:
            for output in delta.outputs:
                print(output.text, end="", flush=True)
                text += output.text
                num_tokens += len(output.token_ids)
            if num_tokens and first_s is None:
                first_s = time.monotonic() - start
            if is_interrupted():
                break
    print()
    if sys.stderr.isatty() and first_s is not None:
        total_s = time.monotonic() - start
        print(f"[{num_tokens} tokens, {num_tokens / total_s:.1f}/s, first after {first_s:.2f} s]", file=sys.stderr)
    return text


def _opening(options: AnswerOptions) -> Messages:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _params(options: AnswerOptions, room: int) -> SamplingParams:
    """`room`: tokens left in the context. An answer longer than that is cut by it, not refused."""
    return SamplingParams(
        max_tokens=options.max_tokens if options.max_tokens <= room else None,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        stop=options.stop,
    )


@contextmanager
def _interrupt() -> Iterator[Callable[[], bool]]:
    """While inside, the first Ctrl-C only makes the yielded question true; a second one interrupts at once."""
    pressed = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)
