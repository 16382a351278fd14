"""Adapters through the whole engine, against PEFT: mixed = alone = PEFT = merged, whatever the scheduler does."""

import adapters_made
import engines
import pytest
import tiny_checkpoint
import torch
from transformers import AutoModelForCausalLM

from izh.config import EngineOptions
from izh.engine.build import build
from izh.errors import AdapterError
from izh.model.source import resolve

BOUND = 1e-4  # absolute, of log-probabilities, against PEFT in float64
CONFIGS = {
    "plain": {},
    "small": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 4, "use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 12}, "alpha_pattern": {"k_proj": 40}},
    "dora": {"use_dora": True},
    "one_layer": {"layers_to_transform": [1]},
    "regex": {"target_modules": r".*\.(0|2)\..*(o_proj|gate_proj)"},
    "all_linear": {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
    "ends": {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    "dora_ends": {"use_dora": True, "target_modules": ["v_proj", "lm_head", "embed_tokens"]},
    "lora_bias": {"lora_bias": True, "target_modules": ["k_proj", "up_proj"]},
    "tokens": {"trainable_token_indices": [7, 3, 300, 9, 41]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
}
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(checkpoint, {name: PEFT's model in float64}, {name: directory}); "base" is the model alone.

    Weights of an ordinary size: at an initializer_range of 0.5 PEFT's own float32 is 1.1e-4 from its float64 (DoRA),
    which says nothing of anybody's arithmetic; at 0.2 it is 1e-5.
    """
    root = tmp_path_factory.mktemp("adapters")
    checkpoint = tiny_checkpoint.save_llama(root / "model", num_hidden_layers=3, initializer_range=0.2)
    folders = {name: root / name for name in CONFIGS}
    models = {
        name: adapters_made.make(checkpoint, folders[name], seed, **config)
        for seed, (name, config) in enumerate(CONFIGS.items(), 1)
    }
    models["base"] = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for model in models.values():
        model.double()
    return checkpoint, models, folders


@pytest.fixture(scope="module")
def start(world):
    checkpoint, _, folders = world

    def start(names=tuple(CONFIGS), **options):
        lora = tuple(f"{name}={folders[name]}" for name in names)
        given = EngineOptions(model=str(checkpoint), lora=lora, **({"kv_cache_gb": 0.02} | options))
        return build(given, resolve(str(checkpoint)), quiet=True).core

    return start


def request(name, prompt=PROMPT, label="", **params):
    adapters = () if name == "base" else ((name, 1.0),)
    made = engines.request(f"{name}{label}", prompt, logprobs=0, **({"max_tokens": 12} | params))
    return type(made)(**{f: getattr(made, f) for f in made.__struct_fields__} | {"adapters": adapters})


def assert_is_peft(model, output, prompt=PROMPT):
    """Greedy by PEFT's own logits, token after token, with PEFT's log-probabilities."""
    assert output.finish.reason == "length", output.finish
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == output.token_ids
    logprobs = logits.log_softmax(-1)
    for position, token in enumerate(output.token_ids):
        assert output.logprobs[position].logprob == pytest.approx(logprobs[position, token].item(), abs=BOUND)


def test_a_mixed_batch_gives_every_request_its_own_adapter(world, start):
    _, models, _ = world
    outputs = engines.run(start(max_loras=16), *(request(name) for name in models))
    assert len({tuple(output.token_ids) for output in outputs.values()}) == len(models)
    for name, model in models.items():
        assert_is_peft(model, outputs[name])


def test_every_row_has_its_own_head_however_the_step_orders_and_cuts_them(world, start, monkeypatch):
    """Greedy and drawn rows are taken apart, prompts are scored a few rows at a time: the head's adapters follow."""
    _, models, _ = world
    monkeypatch.setattr("izh.sampling.head._MAX_PROMPT_LOGITS", 384 * 7)
    drawn = {"temperature": 0.7, "top_k": 1}  # the best token, chosen the other way
    ways = [{}, drawn, {"prompt_logprobs": 0}, drawn | {"prompt_logprobs": 0}]
    given = {name: ways[number % 4] for number, name in enumerate(["ends", "base", "saved", "dora_ends", "plain"])}
    outputs = engines.run(start(max_loras=4), *(request(name, **params) for name, params in given.items()))
    for name, params in given.items():
        assert_is_peft(models[name], outputs[name])
        if "prompt_logprobs" in params:
            with torch.inference_mode():
                exact = models[name](input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1)
            found = [entry.logprob for entry in outputs[name].prompt_logprobs[1:]]
            expected = [exact[place, token].item() for place, token in enumerate(PROMPT[1:])]
            assert found == pytest.approx(expected, abs=BOUND)


def test_alone_and_merged_give_what_the_mixed_batch_gives(world, start):
    _, models, _ = world
    core = start(max_loras=1)
    for name in ("plain", "rslora", "dora"):
        output = engines.run(core, request(name))[name]
        assert_is_peft(models[name], output)


@pytest.mark.parametrize("kernels", ["numba", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 4, "max_num_batched_tokens": 7},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"kv_cache_gb": 20 * 12288 / 2**30, "max_loras": 16, "max_num_batched_tokens": 512},
        {"max_loras": 2},
        {"prefix_caching": False, "max_loras": 3},
    ],
)
def test_no_accident_of_scheduling_changes_an_answer(world, start, options, kernels):
    """In small chunks, one token at a time, preempted for lack of memory, with slots swapped and reused, uncached;
    twice each, so that the second may hit the first one's blocks."""
    _, models, _ = world
    core = start(kernels=kernels, **({"max_loras": 4} | options))
    outputs = engines.run(core, *(request(name, label=f".{i}") for i in range(2) for name in models))
    for name, model in models.items():
        for i in range(2):
            assert_is_peft(model, outputs[f"{name}.{i}"])
    if "kv_cache_gb" in options:
        assert core.stats.num_preempted > 0
    assert core.stats.kv_usage == 0.0


def test_blocks_are_never_shared_across_adapters_but_are_between_equal_weights(world, start):
    checkpoint, models, folders = world
    given = EngineOptions(
        model=str(checkpoint),
        kv_cache_gb=0.02,
        lora=(f"one={folders['plain']}", f"twin={folders['plain']}", f"other={folders['dora']}"),
    )
    core = build(given, resolve(str(checkpoint)), quiet=True).core
    assert engines.run(core, request("one"))["one"].num_cached_tokens == 0
    twin = engines.run(core, request("twin"))["twin"]
    assert twin.num_cached_tokens == 32
    assert_is_peft(models["plain"], twin)
    for name, model in (("other", models["dora"]), ("base", models["base"])):
        output = engines.run(core, request(name))[name]
        assert output.num_cached_tokens == 0
        assert_is_peft(model, output)


def test_base_requests_are_bit_equal_with_and_without_adapters_installed(world, start):
    checkpoint, _, _ = world
    plain = build(EngineOptions(model=str(checkpoint), kv_cache_gb=0.02), resolve(str(checkpoint)), quiet=True).core
    without = engines.run(plain, request("base"))["base"]
    installed = engines.run(start(), request("base"))["base"]
    assert installed.token_ids == without.token_ids
    assert [e.logprob for e in installed.logprobs] == [e.logprob for e in without.logprobs]


def test_scales_and_sums_are_those_of_the_weights(world, start):
    """Half of an adapter, and two at once, against PEFT's own weighted combination by concatenation."""
    checkpoint, _, folders = world
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folders["plain"], adapter_name="plain")
    model.load_adapter(folders["rslora"], adapter_name="rslora")
    model.add_weighted_adapter(["plain", "rslora"], [0.5, 1.5], "sum", combination_type="cat")
    model.set_adapter("sum")
    made = request("plain")
    fields = {f: getattr(made, f) for f in made.__struct_fields__}
    mixed = type(made)(**fields | {"adapters": (("plain", 0.5), ("rslora", 1.5))})
    assert_is_peft(model.double().eval(), engines.run(start(), mixed)["plain"])


def test_impossible_requests_end_with_a_reason_and_no_lease(start):
    core = start(("plain", "dora", "tokens"), max_lora_rank=8)
    made = request("plain")
    fields = {f: getattr(made, f) for f in made.__struct_fields__}
    for adapters, text in (
        ((("missing", 1.0),), "adapter 'missing' is not loaded here; loaded: 'dora', 'plain', 'tokens'"),
        ((("plain", 1.0), ("plain", 0.5)), "rank 16, at most 8"),
        ((("dora", 0.5),), "DoRA"),
        ((("plain", 1.0), ("tokens", 1.0)), "trained tokens"),
    ):
        finish = engines.run(core, type(made)(**fields | {"adapters": adapters}))["plain"].finish
        assert finish.reason == "error"
        assert text in finish.error
    assert not core.has_work


def test_an_engine_without_adapters_refuses_them_by_name(world):
    checkpoint, _, _ = world
    core = build(EngineOptions(model=str(checkpoint), kv_cache_gb=0.02), resolve(str(checkpoint)), quiet=True).core
    finish = engines.run(core, request("plain"))["plain"].finish
    assert (finish.kind, finish.param) == ("NotFoundError", "lora")


def test_an_adapter_of_too_high_a_rank_stops_the_start_with_the_option_to_raise(start):
    with pytest.raises(AdapterError, match="rank 12, at most 8 fits; raise --max-lora-rank"):
        start(("patterns",), max_lora_rank=8)
