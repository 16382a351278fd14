"""Commands that answer, on a small random model: the words of the command line reach a real engine."""

import io

import pytest
import tiny_checkpoint

from izh.bench.contestants import Izh, Transformers
from izh.cli import main
from izh.config import EngineOptions
from izh.llm import LLM
from izh.model.source import resolve
from izh.request import SamplingParams

SMALL = ("--kv-cache-gb", "0.01", "--device", "cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint.save_llama(tmp_path_factory.mktemp("tour"), max_position_embeddings=1024))


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["run", *words, *SMALL, "--max-tokens", "8"]) == 0
    return capsys.readouterr().out


def test_run_prints_what_the_engine_answers(capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    llm = LLM(checkpoint, quiet=True, kv_cache_gb=0.01, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=8)
    raw = llm.generate("the quick", params)[0].outputs[0].text
    chat = llm.chat([{"role": "user", "content": "the quick"}], params)[0].outputs[0].text
    assert raw != chat
    assert answer(capsys, "the quick", checkpoint, "--temperature", "0", "--raw") == raw + "\n"
    assert answer(capsys, "the quick", "--model-dir", checkpoint, "--temperature", "0") == chat + "\n"


def test_a_seed_repeats_an_answer(capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    draws = [answer(capsys, "hello", checkpoint, "--temperature", "1", "--seed", seed) for seed in "112"]
    assert draws[0] == draws[1] != draws[2]


def test_the_prompt_may_come_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkpoint: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    typed = answer(capsys, "-", checkpoint, "--temperature", "0")
    assert typed == answer(capsys, "hello", checkpoint, "--temperature", "0")


def test_a_wrong_option_value_is_one_line(capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    assert main(["run", "hello", checkpoint, "--max-model-len", "1"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "izh: --max-model-len must be at least 2 (a prompt and an answer), got 1"


def test_the_tour_shows_every_stop(capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    assert main(["features", checkpoint, *SMALL]) == 0
    text = capsys.readouterr().out
    assert "the same again:" in text
    assert "choice 2:" in text
    assert "finish_reason stop" in text
    assert "8 of 8 answers identical" in " ".join(text.split())
    assert "skipped: adapter 'pirate' is not loaded here" in " ".join(text.split())
    assert "skipped: the pictures shown here are for the demo model" in " ".join(text.split())
    cached = [line for line in text.splitlines() if "of them cached" in line]
    assert " 0 of them cached" in cached[0]
    assert " 0 of them cached" not in cached[1]


def test_both_contestants_answer_the_same(checkpoint: str) -> None:
    """What `bench throughput` compares does the same work: equal greedy tokens, past the end-of-sequence token too."""
    options = EngineOptions(model=checkpoint, device="cpu", dtype="fp32", kv_cache_gb=0.01)
    ours = Izh(LLM(checkpoint, quiet=True, device="cpu", dtype="fp32", kv_cache_gb=0.01))
    theirs = Transformers(resolve(checkpoint), options)
    prompts = [[5, 6, 7, 8], [20, 30, 40, 50], [300, 200, 100, 2]]
    mine = ours.answer(prompts, 40)
    assert [len(tokens) for tokens in mine] == [40, 40, 40]
    assert theirs.answer(prompts, 40) == mine
