"""A decoder pooled in the generation engine equals `transformers`' hidden states pooled, whatever the scheduler does.

The bound is 1e-5 on vectors of length 1, float32 on both sides.
"""

import engines
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from izh.errors import RequestError
from izh.model.source import resolve
from izh.request import Finish, PoolingParams, Request

BOUND = 1e-5
MODES = ("last", "mean", "cls", "max", "mean_sqrt_len", "weighted_mean")
SIZES = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, head_dim=12, sliding_window=7),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}


def prompt(length, seed=0):
    return torch.randint(3, 199, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt(length, seed) for seed, length in enumerate((1, 5, 16, 33, 61))]


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    """(engine maker, transformers' model)."""
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(CONFIGS[request.param], attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return engines.load(resolve(str(folder))), theirs


def asked(name, token_ids, arrival=0.0, **params):
    return Request(id=name, prompt_token_ids=token_ids, params=PoolingParams(**params), arrival_s=arrival)


def vector(output):
    assert output.finish == Finish(reason="stop"), output.finish
    assert output.token_ids == []
    return torch.frombuffer(bytearray(output.pooled), dtype=torch.float32)


@torch.inference_mode()
def expected(theirs, token_ids, mode="last", skip=0, normalize=True):
    rows = theirs.base_model(input_ids=torch.tensor([token_ids])).last_hidden_state[0].double()
    kept, places = rows[skip:], torch.arange(skip + 1, len(rows) + 1)
    pooled = {
        "last": lambda: rows[-1],
        "cls": lambda: kept[0],
        "mean": lambda: kept.mean(0),
        "max": lambda: kept.amax(0),
        "mean_sqrt_len": lambda: kept.sum(0) / len(kept) ** 0.5,
        "weighted_mean": lambda: (kept * places[:, None]).sum(0) / places.sum(),
    }[mode]()
    return (F.normalize(pooled, dim=0) if normalize else pooled).float()


def assert_close(ours, theirs, bound=BOUND):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_in_one_batch(model, mode):
    loaded, theirs = model
    outputs = engines.run(loaded.engine(), *(asked(str(i), ids, mode=mode) for i, ids in enumerate(PROMPTS)))
    for i, ids in enumerate(PROMPTS):
        assert_close(vector(outputs[str(i)]), expected(theirs, ids, mode))


@pytest.mark.parametrize("mode", ["last", "mean", "weighted_mean"])
def test_in_chunks_of_every_size(model, mode):
    loaded, theirs = model
    ids = PROMPTS[3]
    right = expected(theirs, ids, mode, skip=2)
    for size in range(1, len(ids) + 1):
        engine = loaded.engine(max_num_seqs=1, max_num_batched_tokens=size)
        assert_close(vector(engines.run(engine, asked("it", ids, mode=mode, skip=2))["it"]), right)


def test_only_the_last_row_may_be_had_from_the_cache(model):
    loaded, theirs = model
    engine = loaded.engine()
    ids = PROMPTS[4]
    cold = engines.run(engine, asked("mean", ids, mode="mean"))["mean"]
    warm = engines.run(engine, asked("last", ids))["last"]
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 48), "blocks of a mean are others' to read"
    again = engines.run(engine, asked("again", ids, mode="mean"))["again"]
    assert again.num_cached_tokens == 0
    assert_close(vector(warm), expected(theirs, ids))
    assert_close(vector(again), expected(theirs, ids, "mean"))
    whole = engines.run(engine, asked("whole", ids[:48]))["whole"]
    assert whole.num_cached_tokens == 47, "the last row is always computed"
    assert_close(vector(whole), expected(theirs, ids[:48]))


@pytest.mark.parametrize("mode", ["last", "mean"])
def test_preempted_as_never_preempted(model, mode):
    loaded, theirs = model
    # Two that generate and grow push out the one that is younger, whose prompt is half pooled by then.
    engine = loaded.engine(num_blocks=9, max_num_batched_tokens=4, max_num_seqs=4)
    old = [engines.request(f"old{i}", prompt(16, seed=50 + i), arrival=i, max_tokens=40) for i in range(2)]
    outputs = engines.run(engine, *old, asked("young", PROMPTS[4], arrival=9.0, mode=mode))
    assert engine.stats.num_preempted > 0
    assert_close(vector(outputs["young"]), expected(theirs, PROMPTS[4], mode))


def test_among_generation_that_does_not_notice(model):
    loaded, theirs = model
    prompts = PROMPTS[1:]
    generate = [engines.request(f"g{i}", ids) for i, ids in enumerate(prompts)]
    alone = engines.run(loaded.engine(), *generate)
    pooled = [asked(f"{mode}{i}", ids, mode=mode) for i, ids in enumerate(prompts) for mode in ("last", "mean")]
    mixed = [each for group in zip(generate, pooled[::2], pooled[1::2], strict=True) for each in group]
    together = engines.run(loaded.engine(max_num_batched_tokens=17, max_num_seqs=16), *mixed)
    for each in generate:
        assert together[each.id].token_ids == alone[each.id].token_ids
    for i, ids in enumerate(prompts):
        for mode in ("last", "mean"):
            assert_close(vector(together[f"{mode}{i}"]), expected(theirs, ids, mode))


def test_unnormalized_and_logits(model):
    loaded, theirs = model
    ids = PROMPTS[3]
    requests = [asked("raw", ids, normalize=False), asked("logits", ids, logit_ids=(7, 3)), engines.request("g", ids)]
    outputs = engines.run(loaded.engine(max_num_batched_tokens=9, max_num_seqs=3), *requests)
    raw = expected(theirs, ids, normalize=False)
    assert raw.norm() > 2
    assert_close(vector(outputs["raw"]), raw, 5e-5)
    with torch.inference_mode():
        logits = theirs(input_ids=torch.tensor([ids])).logits[0, -1]
    assert_close(vector(outputs["logits"]), logits[[7, 3]], 5e-5)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(4)
    folder = tmp_path_factory.mktemp("llama-alone")
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(folder)
    return engines.load(resolve(str(folder)))


@pytest.mark.parametrize("mode", ["last", "mean"])
def test_aborted_in_the_middle_nothing_is_left(llama, mode):
    engine = llama.engine(max_num_seqs=2, max_num_batched_tokens=16)
    engine.add(asked("gone", PROMPTS[4], mode=mode))
    assert engine.step() == []
    assert engine.stats.num_running == 1
    engine.abort("gone")
    (output,) = engine.step()
    assert (output.finish.reason, output.pooled) == ("abort", None)
    assert (engine.has_work, engine.stats.kv_usage) == (False, 0.0)
    assert all(not head._pools for head in engine._heads if hasattr(head, "_pools"))


def test_when_all_is_left_out_the_vector_is_zero(llama):
    outputs = engines.run(llama.engine(), asked("it", PROMPTS[1], mode="mean", skip=9))
    assert vector(outputs["it"]).tolist() == [0.0] * 48


def test_a_prompt_may_fill_the_context(llama):
    engine = llama.engine()
    assert engines.run(engine, asked("full", prompt(128)))["full"].finish.reason == "stop"
    finish = engines.run(engine, asked("over", prompt(129)))["over"].finish
    assert (finish.kind, finish.param) == ("ContextLengthError", "prompt")
    assert "129 tokens" in finish.error
    assert "128 tokens" in finish.error


def test_what_cannot_be_is_said(llama):
    finish = engines.run(llama.engine(), asked("it", PROMPTS[1], logit_ids=(199,)))["it"].finish
    assert (finish.reason, finish.param, "199" in finish.error) == ("error", "logit_ids", True)
    for wrong, field in (
        ({"mode": "middle"}, "mode"),
        ({"skip": -1}, "skip"),
        ({"mode": "mean", "logit_ids": (1,)}, "mode"),
    ):
        with pytest.raises(RequestError, match=field):
            PoolingParams(**wrong)


def test_rows_that_are_no_numbers_end_their_own_request_alone(llama):
    engine = llama.engine()
    weight = llama.model.embed_tokens.weight
    kept = weight[150].clone()
    weight[150] = torch.nan
    try:
        outputs = engines.run(engine, asked("bad", [5, 150, 7]), asked("good", [5, 6, 7]))
    finally:
        weight[150] = kept
    assert (outputs["bad"].finish.reason, outputs["bad"].finish.kind) == ("error", "StepError")
    assert outputs["good"].finish.reason == "stop"
