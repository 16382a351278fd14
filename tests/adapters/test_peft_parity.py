"""Each thing that is honoured, against PEFT itself: the deltas put into a plain model by hand give PEFT's logits."""

import adapters_made
import pytest
import tiny_checkpoint
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from izh.adapters.peft import read_peft
from izh.adapters.sites import decoder_sites, shapes_of, targets_of
from izh.config import EngineOptions
from izh.engine.build import build
from izh.kernels.reference import REFERENCE
from izh.model.decoder import Decoder
from izh.model.load import load_spec
from izh.model.source import resolve

BOUND = 1e-5  # of the largest logit; what float32 leaves when products are grouped differently
PROMPT = torch.tensor([list(range(3, 40))])
CONFIGS = {
    "plain": {},
    "r_and_alpha": {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"]},
    "rslora": {"use_rslora": True, "r": 5},
    "rank_pattern": {"rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.up_proj": 12, "^model.layers.0.mlp.*": 5}},
    "alpha_pattern": {"alpha_pattern": {"k_proj": 40, r".*\.1\.self_attn\.(q|v)_proj": 3}},
    "rslora_patterns": {"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 9}},
    "dora": {"use_dora": True},
    "dora_patterns": {"use_dora": True, "use_rslora": True, "rank_pattern": {"o_proj": 4}},
    "dora_ends": {"use_dora": True, "target_modules": ["v_proj", "lm_head", "embed_tokens"]},
    "ends": {"target_modules": ["lm_head", "embed_tokens"]},
    "tied_ends": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "lora_bias": {"lora_bias": True, "use_rslora": True, "target_modules": ["q_proj", "o_proj", "lm_head"]},
    "lora_bias_and_bias": {"lora_bias": True, "bias": "all", "alpha_pattern": {"q_proj": 3}},
    "bias_lora_only": {"bias": "lora_only", "target_modules": ["q_proj", "down_proj"]},
    "bias_all": {"bias": "all", "target_modules": ["q_proj", "up_proj"]},
    "bias_and_dora": {"bias": "all", "use_dora": True, "target_modules": ["q_proj", "o_proj"]},
    "regex": {"target_modules": r".*layers\.(0|2)\..*(o_proj|gate_proj)"},
    "all_linear": {"target_modules": "all-linear"},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["k_proj", "model.layers.1.mlp.up_proj"]},
    "excluded_regex": {"exclude_modules": r".*\.1\..*"},
    "one_layer": {"layers_to_transform": 1},
    "two_layers": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "layers_patterns": {"layers_to_transform": [2], "layers_pattern": ["blocks", "layers"]},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "gaussian": {"init_lora_weights": "gaussian"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Llama with biases in every projection, none of them zero."""
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint.save_llama(folder, num_hidden_layers=3, attention_bias=True, mlp_bias=True, initializer_range=0.1)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    biased = {key: torch.randn_like(t) * 0.5 if key.endswith("bias") else t for key, t in tensors.items()}
    save_file(biased, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def targets(checkpoint):
    return targets_of(load_spec(resolve(str(checkpoint))))


def by_hand(checkpoint, adapter):
    """A plain transformers model with the adapter's deltas merged in."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # the embedding's no longer
    for path, delta in adapter.deltas.items():
        module = model.lm_head if path == "lm_head" else model.model.get_submodule(path)
        is_embedding = path == "embed_tokens"
        own = module.weight.detach()
        if delta.replaced is not None:
            own = own.index_copy(0, delta.row_ids, delta.rows)
        weight = own.T if is_embedding else own
        merged = weight + delta.b @ delta.a
        if delta.magnitude is not None:
            merged = merged * (delta.magnitude / torch.linalg.norm(merged, dim=1))[:, None]
        module.weight = nn.Parameter(merged.T if is_embedding else merged)
        if delta.bias is not None:
            module.bias = nn.Parameter(delta.bias)
        if delta.shift is not None:
            module.bias = nn.Parameter(delta.shift if module.bias is None else module.bias.detach() + delta.shift)
    return model


@torch.inference_mode()
def difference(one, other):
    expected = other(input_ids=PROMPT).logits
    return ((one(input_ids=PROMPT).logits - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_deltas_are_what_peft_computes(checkpoint, targets, tmp_path, name):
    peft_model = adapters_made.make(checkpoint, tmp_path, 1, **CONFIGS[name])
    adapter = read_peft(tmp_path, targets)
    assert difference(by_hand(checkpoint, adapter), peft_model) < BOUND
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert difference(base, peft_model) > 1000 * BOUND
    adapted = {
        key.removeprefix("base_model.model."): layer
        for key, layer in peft_model.named_modules()
        if hasattr(layer, "scaling") and hasattr(layer, "lora_A")
    }
    assert {key.removeprefix("model."): layer.scaling["default"] for key, layer in adapted.items()} == adapter.scales
    assert {key.removeprefix("model."): layer.r["default"] for key, layer in adapted.items()} == {
        path: delta.rank for path, delta in adapter.deltas.items() if delta.rank
    }


def test_of_two_patterns_for_a_module_the_first_in_the_file_counts_and_that_is_said(
    checkpoint, targets, tmp_path, caplog
):
    """PEFT sorts patterns when it saves, so its trained model and its loaded one differ; izh is the loaded one."""
    patterns = {"k_proj": 40, r".*\.1\.self_attn\..*": 3}
    trained = adapters_made.make(checkpoint, tmp_path, 1, alpha_pattern=patterns)
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    with caplog.at_level("WARNING", logger="izh.adapters"):
        mine = by_hand(checkpoint, read_peft(tmp_path, targets))
    assert "model.layers.1.self_attn.k_proj matches several patterns of alpha_pattern" in caplog.text
    assert difference(mine, loaded) < BOUND
    assert difference(mine, trained) > 1000 * BOUND


def test_trained_biases_reach_modules_without_a_and_b_only_with_all(checkpoint, targets, tmp_path):
    for bias, expected in (("lora_only", ["q_proj"]), ("all", ["k_proj", "o_proj", "q_proj", "v_proj"])):
        adapters_made.make(checkpoint, tmp_path / bias, 1, bias=bias, target_modules=["q_proj"])
        deltas = read_peft(tmp_path / bias, targets).deltas
        prefix = "layers.0.self_attn."
        found = [
            path.removeprefix(prefix) for path, d in deltas.items() if path.startswith(prefix) and d.bias is not None
        ]
        assert sorted(found) == expected


def test_pickled_and_half_precision_files_read_as_the_others_do(checkpoint, targets, tmp_path):
    peft_model = adapters_made.make(checkpoint, tmp_path / "one", 1)
    first = read_peft(tmp_path / "one", targets)
    peft_model.save_pretrained(tmp_path / "two", safe_serialization=False, save_embedding_layers=False)
    assert (tmp_path / "two" / "adapter_model.bin").is_file()
    assert read_peft(tmp_path / "two", targets).digest == first.digest
    file = tmp_path / "one" / "adapter_model.safetensors"
    save_file({key: tensor.bfloat16() for key, tensor in load_file(file).items()}, file)
    half = read_peft(tmp_path / "one", targets)
    for path, delta in half.deltas.items():
        assert torch.equal(delta.a, first.deltas[path].a.bfloat16().float())


@pytest.mark.parametrize(
    ("root", "head"),
    [("model.language_model.", "lm_head"), ("language_model.model.", "language_model.lm_head"), ("", None)],
)
def test_the_decoder_may_be_a_part_of_the_adapted_model_or_all_of_it(checkpoint, targets, tmp_path, root, head):
    names = ["q_proj", "embed_tokens"] + ([] if head is None else ["lm_head"])
    adapters_made.make(checkpoint, tmp_path, 1, target_modules=names)
    first = read_peft(tmp_path, targets)
    file, prefix = tmp_path / "adapter_model.safetensors", "base_model.model."
    renamed = {
        key.replace(f"{prefix}model.", prefix + root).replace(f"{prefix}lm_head", f"{prefix}{head}"): tensor
        for key, tensor in load_file(file).items()
    }
    assert renamed.keys() != load_file(file).keys()
    save_file(renamed, file)
    assert read_peft(tmp_path, targets).digest == first.digest


def test_keys_may_carry_the_name_of_the_default_adapter(checkpoint, targets, tmp_path):
    model = adapters_made.make(checkpoint, tmp_path, 1, use_dora=True, target_modules=["q_proj", "embed_tokens"])
    first = read_peft(tmp_path, targets)
    named = {key: tensor.contiguous() for key, tensor in model.state_dict().items() if "lora_" in key}
    assert all(".default" in key for key in named)
    save_file(named, tmp_path / "adapter_model.safetensors")
    assert read_peft(tmp_path, targets).digest == first.digest


def test_the_targets_of_a_spec_are_those_of_the_model(checkpoint):
    spec = load_spec(resolve(str(checkpoint)))
    assert targets_of(spec) == shapes_of(decoder_sites(Decoder(spec, REFERENCE, "meta")))


@pytest.mark.parametrize(
    "name", ["bias_lora_only", "bias_all", "bias_and_dora", "tied_ends", "dora_ends", "lora_bias", "lora_bias_and_bias"]
)
def test_the_engine_computes_it_too(checkpoint, tmp_path, name):
    import engines

    model = adapters_made.make(checkpoint, tmp_path, 1, **CONFIGS[name])
    options = EngineOptions(model=str(checkpoint), kv_cache_gb=0.02, lora=(f"it={tmp_path}",))
    core = build(options, resolve(str(checkpoint)), quiet=True).core
    made = engines.request("it", PROMPT[0].tolist(), logprobs=0, max_tokens=6)
    fields = {f: getattr(made, f) for f in made.__struct_fields__}
    output = engines.run(core, type(made)(**fields | {"adapters": (("it", 1.0),)}))["it"]
    ids = torch.tensor([PROMPT[0].tolist() + output.token_ids])
    with torch.inference_mode():
        logprobs = model(input_ids=ids).logits[0, PROMPT.shape[1] - 1 : -1].log_softmax(-1)
    assert output.token_ids == logprobs.argmax(-1).tolist()
    for position, token in enumerate(output.token_ids):
        assert output.logprobs[position].logprob == pytest.approx(logprobs[position, token].item(), abs=1e-4)
