"""Pooled with an adapter equals PEFT's hidden states pooled: mixed, in chunks, from the prefix cache, aborted."""

import adapters_made
import engines
import pytest
import tiny_checkpoint
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from izh.config import EngineOptions
from izh.engine.build import build
from izh.model.source import resolve
from izh.request import PoolingParams, Request

BOUND = 1e-5  # of vectors of length 1
NAMES = ("base", "one", "two", "head")
PROMPT = list(range(5, 54))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("pooled-adapters")
    checkpoint = tiny_checkpoint.save_llama(root / "model", initializer_range=0.1)
    models = {
        "base": AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval(),
        "one": adapters_made.make(checkpoint, root / "one", 1),
        "two": adapters_made.make(checkpoint, root / "two", 2, r=4, target_modules=["q_proj", "v_proj"]),
        "head": adapters_made.make(checkpoint, root / "head", 3, target_modules=["q_proj", "lm_head"]),
    }
    return checkpoint, models, tuple(f"{name}={root / name}" for name in NAMES[1:])


@pytest.fixture
def start(world):
    checkpoint, _, lora = world

    def start(**options):
        given = EngineOptions(model=str(checkpoint), lora=lora, **({"kv_cache_gb": 0.01} | options))
        return build(given, resolve(str(checkpoint)), quiet=True)

    return start


def asked(name, label="", token_ids=PROMPT, **params):
    adapters = () if name == "base" else ((name, 1.0),)
    params = PoolingParams(**params)
    return Request(id=f"{name}{label}", prompt_token_ids=token_ids, params=params, arrival_s=0.0, adapters=adapters)


def vector(output):
    assert output.finish.reason == "stop", output.finish
    return torch.frombuffer(bytearray(output.pooled), dtype=torch.float32)


@torch.inference_mode()
def reference(model, token_ids=PROMPT):
    """(hidden rows, logits after the last token)."""
    out = model(input_ids=torch.tensor([token_ids]), output_hidden_states=True)
    return out.hidden_states[-1][0], out.logits[0, -1]


def assert_right(output, model, mode):
    rows, _ = reference(model)
    right = F.normalize(rows[-1] if mode == "last" else rows.mean(0), dim=0)
    torch.testing.assert_close(vector(output), right, rtol=0, atol=BOUND)


@pytest.mark.parametrize("budget", [7, 512])
def test_mixed_in_a_batch_each_is_pefts(world, start, budget):
    core = start(max_num_seqs=7, max_num_batched_tokens=budget).core
    requests = [asked(name, mode, mode=mode) for name in NAMES for mode in ("last", "mean")]
    outputs = engines.run(core, *requests, engines.request("answer", PROMPT))
    assert len({output.pooled for output in outputs.values()}) == len(requests) + 1
    for name in NAMES:
        for mode in ("last", "mean"):
            assert_right(outputs[f"{name}{mode}"], world[1][name], mode)


def test_an_adapters_blocks_are_its_own(world, start):
    core = start().core
    assert engines.run(core, asked("one", "cold"))["onecold"].num_cached_tokens == 0
    outputs = engines.run(core, asked("one"), asked("two"), asked("base"))
    assert [outputs[name].num_cached_tokens for name in ("one", "two", "base")] == [48, 0, 0]
    for name in ("one", "two", "base"):
        assert_right(outputs[name], world[1][name], "last")


def test_logits_of_an_adapted_head_beside_other_rows(world, start):
    core = start(max_num_batched_tokens=64, max_num_seqs=8).core
    requests = [asked(name, "logits", logit_ids=(9, 300)) for name in NAMES]
    outputs = engines.run(core, *requests, asked("one", "mean", mode="mean"), engines.request("answer", PROMPT))
    for name in NAMES:
        _, logits = reference(world[1][name])
        torch.testing.assert_close(vector(outputs[f"{name}logits"]), logits[[9, 300]], rtol=0, atol=5e-5)


def test_aborted_in_the_middle_it_gives_its_lease_back(start):
    engine = start(max_num_batched_tokens=16, max_num_seqs=2)
    engine.core.add(asked("one", mode="mean"))
    for _ in range(100):
        engine.core.step()
        if engine.core.stats.num_running:
            break
    engine.core.abort("one")
    engines.drain(engine.core)
    assert engine.core.stats.kv_usage == 0.0
    engine.adapters.pop("one")  # refused while anybody leases it
