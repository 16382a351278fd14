"""The native encoders equal transformers, a sequence is the same in any company, and what does not fit is named."""

import encoders_made
import pytest
import torch
from safetensors.torch import load_file, save_file

from izh.errors import ModelLoadError
from izh.kernels.cpu.table import NUMBA
from izh.kernels.cpu.threads import choose_layer
from izh.kernels.reference import REFERENCE
from izh.model.encoders.load import load_encoder, read_encoder_config
from izh.model.encoders.spec import native_spec

choose_layer()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """family -> (directory, the transformers model)."""
    made = {}
    for family in encoders_made.FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        made[family] = (folder, encoders_made.save(folder, family))
    return made


def load(folder, ops=NUMBA, num_labels=None):
    spec = native_spec(read_encoder_config(folder))
    assert spec is not None
    return load_encoder(folder, spec, ops, num_labels)


def sequences(lens, vocab, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, vocab, (n,), generator=generator) for n in lens]


def packed(parts):
    return torch.cat(parts), torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("ops", [REFERENCE, NUMBA])
@pytest.mark.parametrize("family", encoders_made.FAMILIES)
@torch.inference_mode()
def test_rows_are_those_of_transformers(checkpoints, family, ops):
    folder, model = checkpoints[family]
    encoder, _ = load(folder, ops)
    parts = sequences([1, 5, 60, 17, 33], encoder.spec.vocab_size)
    rows = encoder.forward(*packed(parts)).split([len(part) for part in parts])
    for part, ours in zip(parts, rows, strict=True):
        theirs = model(input_ids=part[None]).last_hidden_state[0]
        assert theirs.std() > 0.3
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", encoders_made.FAMILIES)
def test_a_sequence_is_the_same_alone_and_among_others(checkpoints, family):
    encoder, _ = load(checkpoints[family][0])
    parts = sequences([1, 50, 2, 31, 60, 16], encoder.spec.vocab_size)
    together = encoder.forward(*packed(parts))
    assert torch.equal(together, torch.cat([encoder.forward(*packed([part])) for part in parts]))


@torch.inference_mode()
def test_types_are_berts(checkpoints):
    folder, model = checkpoints["bert"]
    encoder, _ = load(folder)
    (part,) = sequences([20], encoder.spec.vocab_size)
    types = (torch.arange(20) > 8).long()
    ours = encoder.forward(*packed([part]), types)
    theirs = model(input_ids=part[None], token_type_ids=types[None]).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ours, encoder.forward(*packed([part])), atol=1e-3)


@torch.inference_mode()
def test_robertas_positions_pass_over_the_padding_id_inside_a_text(checkpoints):
    folder, model = checkpoints["roberta"]
    encoder, _ = load(folder)
    parts = [torch.tensor([0, 9, 1, 1, 12, 2]), torch.tensor([1, 8, 2])]
    rows = encoder.forward(*packed(parts)).split([6, 3])
    for part, ours in zip(parts, rows, strict=True):
        theirs = model(input_ids=part[None], attention_mask=torch.ones(1, len(part))).last_hidden_state[0]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", encoders_made.FAMILIES)
@torch.inference_mode()
def test_class_scores_are_those_of_transformers(tmp_path, family):
    options = {"classifier_pooling": "mean"} if family == "modernbert" else {}
    model = encoders_made.save(tmp_path, family, num_labels=3, **options)
    encoder, head = load(tmp_path, num_labels=3)
    parts = sequences([4, 40], encoder.spec.vocab_size)
    rows = encoder.forward(*packed(parts)).split([4, 40])
    mean = encoder.spec.head_pooling == "mean"
    ours = head(torch.stack([part.mean(0) if mean else part[0] for part in rows]))
    theirs = torch.cat([model(input_ids=part[None]).logits for part in parts])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"attention_bias": True, "mlp_bias": True, "norm_bias": True}, {"hidden_activation": "gelu_pytorch_tanh"}],
)
@torch.inference_mode()
def test_modernberts_options(tmp_path, options):
    model = encoders_made.save(tmp_path, "modernbert", **options)
    encoder, _ = load(tmp_path)
    (part,) = sequences([45], encoder.spec.vocab_size)
    theirs = model(input_ids=part[None]).last_hidden_state[0]
    torch.testing.assert_close(encoder.forward(*packed([part])), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_half_precision_checkpoints_are_computed_in_float32(checkpoints, tmp_path, dtype):
    folder, _ = checkpoints["bert"]
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    rows = load(tmp_path)[0].forward(*packed(sequences([9], 60)))
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows, load(folder)[0].forward(*packed(sequences([9], 60))), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("encoder.layer.1.output.dense.bias"), "'encoder.layer.1.output.dense.bias' is missing"),
        (lambda t: t.pop("encoder.layer.1.output.dense.weight"), "'encoder.layer.1.output.dense.weight' is missing"),
        (lambda t: t.update({"encoder.layer.9.x": torch.zeros(1)}), "'encoder.layer.9.x' has no place"),
        (lambda t: t.update({"embeddings.LayerNorm.weight": torch.zeros(3)}), r"has shape \[3\], .* \[48\]"),
        (lambda t: t.update({"bert.embeddings.LayerNorm.weight": torch.zeros(3)}), "comes twice"),
        (lambda t: t.update({"cls.predictions.bias": torch.zeros(3)}), None),
    ],
)
def test_tensors_that_do_not_fit_are_named(checkpoints, tmp_path, change, says):
    folder, _ = checkpoints["bert"]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    if says is None:
        load(tmp_path)
    else:
        with pytest.raises(ModelLoadError, match=says):
            load(tmp_path)


def test_old_names_of_a_norm_and_the_prefix_of_a_task_model(checkpoints, tmp_path):
    folder, _ = checkpoints["bert"]
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for new, was in old.items():
            name = name.replace(new, was)
        tensors[f"bert.{name}"] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    parts = packed(sequences([7, 3], 60))
    assert torch.equal(load(tmp_path)[0].forward(*parts), load(folder)[0].forward(*parts))


@pytest.mark.parametrize(
    ("family", "options"),
    [("bert", {"hidden_act": "silu"}), ("bert", {"is_decoder": True}), ("roberta", {"hidden_act": "mish"})],
)
def test_forms_that_are_not_ours_have_no_native_spec(family, options):
    assert native_spec(encoders_made.config(family, **options)) is None


def test_longrope_modernbert_has_no_native_spec():
    config = encoders_made.config("modernbert")
    config.rope_parameters["full_attention"]["rope_type"] = "yarn"
    assert native_spec(config) is None
