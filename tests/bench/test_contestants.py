"""Which adapter answers which prompt, and that every engine gives the same answers with it."""

from pathlib import Path

import pytest
import tiny_checkpoint

from izh.bench.adapters import write_adapters
from izh.bench.contestants import Izh, Peft, deal
from izh.bench.shapes import SHAPES
from izh.config import EngineOptions
from izh.errors import OptionError
from izh.llm import LLM
from izh.model.load import load_spec
from izh.model.source import resolve

OPTIONS = EngineOptions(device="cpu", dtype="fp32")
PROMPTS = [[5, 6, 7, 8], [20, 30, 40, 50], [300, 200, 100, 2], [9, 9, 9, 9]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint.save_llama(tmp_path_factory.mktemp("contestants")))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, checkpoint: str) -> list[Path]:
    spec = load_spec(resolve(checkpoint))
    return list(write_adapters(tmp_path_factory.mktemp("adapters"), spec, SHAPES["r16-all"], 6))


@pytest.fixture(scope="module")
def llm(checkpoint: str, adapters: list[Path]) -> LLM:
    lora = tuple(f"{directory.name}={directory}" for directory in adapters)
    return LLM(checkpoint, quiet=True, device="cpu", dtype="fp32", kv_cache_gb=0.01, lora=lora, max_loras=6)


def test_few_adapters_take_turns_within_a_batch() -> None:
    assert deal(3, 8, turn=0) == deal(3, 8, turn=5) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert deal(8, 8, turn=1) == list(range(8))


@pytest.mark.parametrize(("num_adapters", "num_prompts"), [(64, 32), (48, 32), (9, 2), (65, 32), (5, 4)])
def test_many_adapters_are_all_used_after_some_turns(num_adapters: int, num_prompts: int) -> None:
    dealt = [deal(num_adapters, num_prompts, turn) for turn in range(-(-num_adapters // num_prompts))]
    assert all(len(set(each)) == num_prompts for each in dealt)
    assert {index for each in dealt for index in each} == set(range(num_adapters))


def test_every_second_of_64() -> None:
    assert deal(64, 32, turn=0) == list(range(0, 64, 2))
    assert deal(64, 32, turn=1) == list(range(1, 64, 2))


@pytest.mark.parametrize("count", [1, 3, 6])
def test_izh_and_peft_answer_alike_and_unlike_the_base(
    checkpoint: str, adapters: list[Path], llm: LLM, count: int
) -> None:
    ours = Izh(llm, "ours", [directory.name for directory in adapters[:count]])
    theirs = Peft(resolve(checkpoint), OPTIONS, adapters[:count], "theirs")
    base = Izh(llm).answer(PROMPTS, 20)
    by_turn = [ours.answer(PROMPTS, 20, turn) for turn in (0, 1)]
    assert [theirs.answer(PROMPTS, 20, turn) for turn in (0, 1)] == by_turn
    for answers in by_turn:
        assert [len(answer) for answer in answers] == [20] * 4
        assert all(answer != plain for answer, plain in zip(answers, base, strict=True))
    assert (by_turn[0] == by_turn[1]) is (count <= len(PROMPTS))


def test_a_model_that_peft_cannot_adapt_is_named(tmp_path: Path, checkpoint: str, adapters: list[Path]) -> None:
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    Phi3ForCausalLM(config).save_pretrained(tmp_path / "fused")
    with pytest.raises(
        OptionError, match=r"PEFT cannot adapt fused: .* has no model\.layers\.0\.mlp\.gate_proj; .* --no-peer"
    ):
        Peft(resolve(str(tmp_path / "fused")), OPTIONS, adapters[:1], "theirs")
