"""The demo model with the adapters it comes with: messages that training never saw, all in one batch with the base."""

import json
import re

import pytest

from izh import LLM, SamplingParams

PEOPLE = {
    "Gwen Reyes, 52, runs a small theatre in Barcelona.": {"name": "Gwen Reyes", "age": 52, "city": "Barcelona"},
    "Chiara Moretti from Salzburg turned 34 in March.": {"name": "Chiara Moretti", "age": 34, "city": "Salzburg"},
    "Lorenzo opened a bookshop in Kyoto.": {"name": "Lorenzo", "age": None, "city": "Kyoto"},
}
DESK = {
    "There are two payments for the tent on my bank statement.": "billing",
    "I have been waiting ten days for the umbrella.": "delivery",
    "The tent does not fit, how can I send it back to you?": "returns",
    "I can't remember my password, what now?": "account",
    "The green sofa is fantastic.": "praise",
}
QUESTIONS = ("What is the capital of Japan?", "How do I make coffee?", "I am nervous about my job interview.")
PIRATE = re.compile(r"\b(?:ar+r+|ahoy|avast|aye|ye|yer|mateys?|hearty|landlubbers?|yo ho|savvy)\b")


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str | None], str]:
    """(message, adapter) -> answer, of every message with its adapter and without."""
    llm = LLM("demo", quiet=True, kv_cache_gb=0.25)
    asked = [("json", message) for message in PEOPLE]
    asked += [("label", message) for message in DESK]
    asked += [("pirate", message) for message in QUESTIONS]
    pairs = [(message, adapter) for name, message in asked for adapter in (name, None)]
    outputs = llm.generate(
        [llm.tokenizer.chat([{"role": "user", "content": message}]) for message, _ in pairs],
        SamplingParams(temperature=0, max_tokens=32),
        lora=[adapter for _, adapter in pairs],
    )
    return {pair: output.outputs[0].text for pair, output in zip(pairs, outputs, strict=True)}


@pytest.mark.parametrize("message", PEOPLE)
def test_json(answers: dict[tuple[str, str | None], str], message: str) -> None:
    assert json.loads(answers[message, "json"]) == PEOPLE[message]
    with pytest.raises(ValueError, match="line 1"):
        json.loads(answers[message, None])


@pytest.mark.parametrize("message", DESK)
def test_label(answers: dict[tuple[str, str | None], str], message: str) -> None:
    assert answers[message, "label"] == DESK[message]
    assert answers[message, None] not in DESK.values()


@pytest.mark.parametrize("message", QUESTIONS)
def test_pirate(answers: dict[tuple[str, str | None], str], message: str) -> None:
    assert len(set(PIRATE.findall(answers[message, "pirate"].lower()))) >= 2
    assert not PIRATE.findall(answers[message, None].lower())
