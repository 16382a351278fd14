"""Trained tokens, modules saved whole and copies of base weights, in the engine against the model PEFT loads from the
file; and what is refused of them."""

import json

import adapters_made
import engines
import pytest
import tiny_checkpoint
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from izh.adapters.bank import AdapterBank
from izh.adapters.peft import read_peft
from izh.adapters.sites import num_adapter_values, targets_of
from izh.adapters.weights import Adapter, ModuleDelta
from izh.config import EngineOptions
from izh.engine.build import build
from izh.errors import AdapterError
from izh.kernels.select import select
from izh.model.load import load_decoder, load_spec
from izh.model.source import resolve

BOUND = 1e-4  # absolute, of log-probabilities, against PEFT in float64
TOKENS = [7, 3, 300, 9, 41]  # some of them in the prompt
PROMPT = list(range(3, 40))
ENDS = ["embed_tokens", "lm_head"]
CONFIGS = {  # name: (config, tied and untied)
    "tokens": {"trainable_token_indices": TOKENS},
    "tokens_and_copies": {"trainable_token_indices": TOKENS, "save_embedding_layers": True},
    "tokens_of_both": {"trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS}},
    "tokens_of_each": {"trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": [5, 11]}},
    "tokens_of_the_head": {"trainable_token_indices": {"lm_head": TOKENS}},
    "tokens_kept_tied": {"trainable_token_indices": TOKENS, "ensure_weight_tying": True},
    "tokens_and_head": {"trainable_token_indices": TOKENS, "target_modules": ["q_proj", "lm_head"]},
    "tokens_and_dora": {"trainable_token_indices": TOKENS, "use_dora": True},
    "head": {"modules_to_save": ["lm_head"]},
    "head_and_copies": {"modules_to_save": ["lm_head"], "save_embedding_layers": True},
    "head_targeted_too": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "lm_head"]},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "embedding_and_copies": {"modules_to_save": ["embed_tokens"], "save_embedding_layers": True},
    "both": {"modules_to_save": ENDS},
    "both_tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "both_tied_by_the_head": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "both_tied_beside_lora": {
        "modules_to_save": ["lm_head"],
        "target_modules": ["q_proj", "embed_tokens"],
        "ensure_weight_tying": True,
    },
    "copies": {"save_embedding_layers": True},
    "copies_of_targets": {"target_modules": ["q_proj", *ENDS], "save_embedding_layers": "auto"},
    "copies_of_dora_targets": {"target_modules": ["q_proj", *ENDS], "use_dora": True, "save_embedding_layers": True},
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoint(request, tmp_path_factory):
    return tiny_checkpoint.save_llama(
        tmp_path_factory.mktemp("model"), tie_word_embeddings=request.param, initializer_range=0.2
    )


@pytest.fixture(scope="module")
def model(checkpoint):
    source, device = resolve(str(checkpoint)), torch.device("cpu")
    return load_decoder(source, load_spec(source), select(device, "reference"), device, torch.float32)[0]


@pytest.fixture(scope="module")
def bank(model):
    return AdapterBank(model, capacity=2, max_rank=8)


@pytest.fixture(scope="module")
def targets(bank):
    return bank.shapes


def loaded(checkpoint, folder):
    """What PEFT makes of the file, in float64."""
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder).double().eval()


def answer(checkpoint, folder, beside=()):
    options = EngineOptions(model=str(checkpoint), kv_cache_gb=0.02, lora=(f"it={folder}", *beside))
    core = build(options, resolve(str(checkpoint)), quiet=True).core
    requests = [adapted("it"), *(adapted(each.partition("=")[0]) for each in beside), engines.request("base", PROMPT)]
    return engines.run(core, *requests)["it"]


def adapted(name):
    made = engines.request(name, PROMPT, logprobs=0, max_tokens=6)
    return type(made)(**{f: getattr(made, f) for f in made.__struct_fields__} | {"adapters": ((name, 1.0),)})


def assert_is(output, peft_model):
    with torch.inference_mode():
        logits = peft_model(input_ids=torch.tensor([PROMPT + output.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    assert output.token_ids == logprobs.argmax(-1).tolist()
    for position, token in enumerate(output.token_ids):
        assert output.logprobs[position].logprob == pytest.approx(logprobs[position, token].item(), abs=BOUND)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_computes_what_peft_loads(checkpoint, tmp_path, name):
    trained = adapters_made.make(
        checkpoint, tmp_path / "it", 1, r=4, **({"target_modules": ["q_proj"]} | CONFIGS[name])
    )
    adapters_made.make(checkpoint, tmp_path / "plain", 2)
    peft_model = loaded(checkpoint, tmp_path / "it")
    with torch.inference_mode():
        ids = torch.tensor([PROMPT])
        assert (peft_model(input_ids=ids).logits - trained.double()(input_ids=ids).logits).abs().max() < 1e-9
    assert_is(answer(checkpoint, tmp_path / "it", beside=(f"plain={tmp_path / 'plain'}",)), peft_model)


@pytest.mark.parametrize("name", ["copies", "copies_of_targets", "tokens_and_copies", "head_and_copies"])
def test_copies_that_equal_the_served_weights_cost_nothing(checkpoint, targets, tmp_path, name):
    config = {"target_modules": ["q_proj"]} | CONFIGS[name]
    adapters_made.make(checkpoint, tmp_path / "with", 1, **config)
    adapters_made.make(checkpoint, tmp_path / "without", 1, **(config | {"save_embedding_layers": False}))
    assert len(load_file(tmp_path / "with" / "adapter_model.safetensors")) > len(
        load_file(tmp_path / "without" / "adapter_model.safetensors")
    )
    adapter = read_peft(tmp_path / "with", targets)
    assert adapter.digest == read_peft(tmp_path / "without", targets).digest


@pytest.mark.parametrize("config", [{}, {"target_modules": ["q_proj", "lm_head"]}, {"trainable_token_indices": TOKENS}])
def test_copies_that_differ_are_what_peft_computes_with(checkpoint, tmp_path, config):
    """As of an adapter that was trained on another base; PEFT writes them over the base."""
    adapters_made.make(
        checkpoint, tmp_path, 1, **({"target_modules": ["q_proj"], "save_embedding_layers": True} | config)
    )
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    torch.manual_seed(2)
    noise = 0.1 * torch.randn(335, 64)
    copies = [key for key in tensors if key.endswith("weight") and tensors[key].shape == noise.shape]
    assert copies
    save_file(tensors | {key: tensors[key] + noise for key in copies}, file)
    assert_is(answer(checkpoint, tmp_path), loaded(checkpoint, tmp_path))


def test_without_a_loaded_model_a_copy_is_taken_for_another_weight(checkpoint, targets, tmp_path):
    adapters_made.make(checkpoint, tmp_path, 1, save_embedding_layers=True)
    delta = read_peft(tmp_path, targets_of(load_spec(resolve(str(checkpoint))))).deltas["lm_head"]
    assert targets.holds["lm_head"](delta.rows)
    assert "lm_head" not in read_peft(tmp_path, targets).deltas


def rows_only(path, ids, rows):
    """An adapter that replaces rows and does nothing else."""
    a, b = (335, 64) if path == "embed_tokens" else (64, 335)
    return Adapter({path: ModuleDelta(torch.zeros(0, a), torch.zeros(b, 0), row_ids=torch.tensor(ids), rows=rows)})


@torch.inference_mode()
def test_each_row_of_a_step_gets_its_own_adapters_rows_and_a_slot_forgets_them(model, bank):
    ids, hidden, rows = torch.tensor([4, 7, 7, 9]), torch.randn(4, 64), torch.randn(2, 64)
    bank.activate([-1] * 4)
    base_rows, base_logits = model.embed_tokens(ids), model.logits(hidden)
    adapters = rows_only("embed_tokens", [4, 7], rows), rows_only("lm_head", [0, 334], rows)
    for slot, adapter in enumerate(adapters):
        bank.check(adapter)
        bank.write(slot, adapter)
    bank.activate([0, 0, -1, 1])
    assert torch.equal(model.embed_tokens(ids), torch.stack([rows[0], rows[1], base_rows[2], base_rows[3]]))
    expected = base_logits.clone()
    expected[3, [0, 334]] = rows @ hidden[3]
    torch.testing.assert_close(model.logits(hidden), expected)
    assert torch.equal(model.logits(hidden)[:3], base_logits[:3])
    for slot, adapter in enumerate(reversed(adapters)):
        bank.write(slot, adapter)
    assert torch.equal(model.embed_tokens(ids), torch.stack([base_rows[0], base_rows[1], base_rows[2], base_rows[3]]))
    expected = base_logits.clone()
    expected[:2, [0, 334]] = hidden[:2] @ rows.T
    torch.testing.assert_close(model.logits(hidden), expected)


def test_a_bank_holds_what_was_counted_before_memory_was_dealt_out(checkpoint, tmp_path):
    """At the most: with DoRA, a trained bias and a rank of their own in every target."""
    source, device = resolve(str(checkpoint)), torch.device("cpu")
    spec = load_spec(source)
    model = load_decoder(source, spec, select(device, "reference"), device, torch.float32)[0]
    bank = AdapterBank(model, capacity=3, max_rank=8)
    made = {"use_dora": True, "target_modules": [*adapters_made.ALL, *ENDS]}
    adapters_made.make(checkpoint, tmp_path, 1, **made)
    bank.write(0, bank.fit(read_peft(tmp_path, bank.shapes)))
    tensors = [
        tensor
        for wrapped in [*model.modules()]
        for tensor in (getattr(wrapped, name, None) for name in ("a", "b", "gain", "shift"))
        if isinstance(tensor, torch.Tensor)
    ]
    held = sum(tensor.numel() for tensor in tensors)
    counted = num_adapter_values(spec, 3, 8)
    unused = 2 * 3 * 64  # an embedding's gains are kept by the slot that has them, and it has no shift
    assert held == counted - unused


def test_replaced_rows_stay_where_the_adapter_is(model, bank):
    """On the host a slot points at them: a whole head in each of many slots would not fit otherwise."""
    rows = torch.randn(335, 64)
    bank.write(0, rows_only("lm_head", list(range(335)), rows))
    assert model.lm_head._replaced[0, 0].values.data_ptr() == rows.data_ptr()


@pytest.mark.parametrize(
    ("path", "ids", "shape", "text"),
    [
        ("lm_head", [335], (1, 64), r"lm_head: row 335 is replaced; the model's weight has 335 rows"),
        ("lm_head", [3, 2], (2, 64), r"ascending, each once"),
        ("lm_head", [3, 3], (2, 64), r"ascending, each once"),
        ("lm_head", [3], (1, 63), r"lm_head: \(1, 63\) values for 1 rows; .* 335 rows of 64"),
        ("embed_tokens", [3], (2, 64), r"embed_tokens: \(2, 64\) values for 1 rows"),
        ("embed_tokens", [-1], (1, 64), r"embed_tokens: row -1"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_the_bank(bank, path, ids, shape, text):
    with pytest.raises(AdapterError, match=text):
        bank.check(rows_only(path, ids, torch.zeros(shape)))


def test_what_is_no_finite_number_is_refused_by_the_bank(bank):
    with pytest.raises(AdapterError, match="lm_head: rows holds values that are not finite"):
        bank.check(rows_only("lm_head", [1], torch.full((1, 64), torch.nan)))


def test_a_bias_added_to_an_embedding_is_refused_by_the_bank(bank):
    delta = ModuleDelta(torch.zeros(0, 335), torch.zeros(64, 0), shift=torch.ones(64))
    with pytest.raises(AdapterError, match="embed_tokens: the adapter adds a bias, but an embedding has none"):
        bank.check(Adapter({"embed_tokens": delta}))


def edit(folder, fields=None, tensors=None):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (fields or {})))
    found = load_file(folder / "adapter_model.safetensors")
    for name, tensor in (tensors or {}).items():
        matching = [key for key in found if key.endswith(name)]
        for key in matching or ["base_model.model." + name]:
            found.pop(key, None)
            if tensor is not None:
                found[key] = tensor
    save_file(found, folder / "adapter_model.safetensors")


DELTA = "embed_tokens.token_adapter.trainable_tokens_delta"


@pytest.mark.parametrize(
    ("config", "fields", "tensors", "text"),
    [
        ("tokens", {"trainable_token_indices": [7, 3]}, {}, r"embed_tokens: trained tokens is \(5, 64\), expected \(2"),
        (
            "tokens",
            {"trainable_token_indices": None},
            {},
            "embed_tokens: trained tokens found, but trainable_token_ind",
        ),
        ("tokens", {"trainable_token_indices": [7, 3, 335, 9, 41]}, {}, "holds 335; the model has 335 tokens"),
        ("tokens", {"trainable_token_indices": {"foo.embed_tokens": [1]}}, {}, "'foo.embed_tokens', which the adapted"),
        ("tokens", {"target_modules": ["q_proj", "embed_tokens"]}, {DELTA: None}, "targets 1 modules without weights"),
        (
            "tokens",
            {"modules_to_save": ["embed_tokens"]},
            {},
            r"trainable_token_indices = .*saved whole or targeted too",
        ),
        ("tokens", {}, {DELTA: None}, "embed_tokens: trained tokens is missing"),
        ("tokens", {}, {DELTA: torch.full((5, 64), torch.inf)}, "embed_tokens: trained tokens holds .* not finite"),
        (
            "tokens_of_the_head",
            {},
            {"lm_head.token_adapter.trainable_tokens_delta": torch.ones(5, 64, dtype=torch.int32)},
            "lm_head: trained tokens is torch.int32",
        ),
        ("head", {}, {"lm_head.weight": torch.ones(336, 64)}, r"lm_head: weight is \(336, 64\), expected \(335, 64\)"),
        ("head", {}, {"lm_head.weight": None}, "lm_head: weight is missing"),
        ("head_and_copies", {}, {"lm_head.modules_to_save.weight": torch.ones(335, 64)}, "weight is there twice"),
        ("copies", {}, {"lm_head.weight": torch.full((335, 64), torch.nan)}, "lm_head: weight holds .* not finite"),
        ("copies_of_targets", {}, {"lm_head.weight": torch.ones(335, 64)}, "lm_head: copy of the base weight is there"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(checkpoint, targets, tmp_path, config, fields, tensors, text):
    adapters_made.make(checkpoint, tmp_path, 1, **({"target_modules": ["q_proj"]} | CONFIGS[config]))
    edit(tmp_path, fields, tensors)
    with pytest.raises(AdapterError, match=text):
        read_peft(tmp_path, targets)


@pytest.mark.parametrize("checkpoint", [True], indirect=True, ids=["tied"])
@pytest.mark.parametrize(
    ("config", "fields", "tensors", "text"),
    [
        ("copies", {}, {"lm_head.weight": torch.ones(335, 64)}, "copies of the weight that .* share differ"),
        (
            "both_tied",
            {},
            {"lm_head.weight": torch.ones(335, 64)},
            "ensure_weight_tying = True, but the weights .* differ",
        ),
        ("tokens_of_each", {"ensure_weight_tying": True}, {}, r"trainable_token_indices = .* ensure_weight_tying ties"),
        ("tokens", {"modules_to_save": ["lm_head"]}, {}, "trainable_token_indices = .* reaches the head"),
        (
            "tokens_and_copies",
            {},
            {"lm_head.token_adapter.trainable_tokens_delta": torch.ones(5, 64)},
            "lm_head: trained tokens is there twice",
        ),
    ],
)
def test_what_tied_weights_make_impossible_is_refused(checkpoint, targets, tmp_path, config, fields, tensors, text):
    adapters_made.make(checkpoint, tmp_path, 1, **({"target_modules": ["q_proj"]} | CONFIGS[config]))
    edit(tmp_path, fields, tensors)
    with pytest.raises(AdapterError, match=text):
        read_peft(tmp_path, targets)
