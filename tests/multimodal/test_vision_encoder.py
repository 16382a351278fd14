"""The encoder: its shape, its refusals, what each row may depend on, and its directory."""

import json

import pytest
import torch
import torch.nn.functional as F

from izh.errors import ModelLoadError
from izh.multimodal import VisionConfig, VisionEncoder

SIZES = {"image_size": 16, "patch_size": 4, "width": 32, "heads": 4, "layers": 2, "output_width": 24}


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return VisionEncoder(VisionConfig(**SIZES)).eval()


def pixels(count=2, size=16):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(1)) * 2 - 1


def test_sixteen_pixels_in_patches_of_four_are_sixteen_rows(encoder):
    rows = encoder(pixels())
    assert rows.shape == (2, 16, 24)
    assert encoder.config.grid == (1, 4, 4)
    assert encoder.config.num_patches == 16


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"patch_size": 5}, "image_size 16 does not divide into patches of 5"),
        ({"heads": 5}, "width 32 does not divide into 5 heads"),
        ({"layers": 0}, "layers must be a positive integer"),
        ({"width": 32.0}, "width must be a positive integer"),
    ],
)
def test_impossible_sizes_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        VisionEncoder(VisionConfig(**(SIZES | wrong)))


@pytest.mark.parametrize("shape", [(1, 3, 16, 20), (1, 1, 16, 16), (3, 16, 16), (1, 3, 32, 32)])
def test_pixels_of_another_shape_are_refused(encoder, shape):
    with pytest.raises(ValueError, match=r"pixels must be \[B, 3, 16, 16\], got"):
        encoder(torch.zeros(shape))


def test_it_is_the_function_described(encoder):
    """Patches, positions, pre-norm attention over all patches, 4x GELU MLP, norm, GELU projector, written out anew."""
    image = pixels(1)
    weights = dict(encoder.named_parameters())

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name, x):
        return F.layer_norm(x, (32,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    rows = []
    for top in range(0, 16, 4):
        for left in range(0, 16, 4):
            patch = image[0, :, top : top + 4, left : left + 4].flatten()
            rows.append(weights["patch_proj.weight"].flatten(1) @ patch + weights["patch_proj.bias"])
    x = torch.stack(rows) + weights["positions"]
    for i in range(2):
        q, k, v = linear(f"layers.{i}.qkv_proj", norm(f"layers.{i}.attention_norm", x)).split(32, dim=-1)
        heads = []
        for h in range(0, 32, 8):
            part = slice(h, h + 8)
            heads.append((q[:, part] @ k[:, part].T / 8**0.5).softmax(-1) @ v[:, part])
        x = x + linear(f"layers.{i}.o_proj", torch.cat(heads, -1))
        inner = linear(f"layers.{i}.up_proj", norm(f"layers.{i}.mlp_norm", x))
        assert inner.shape == (16, 128)
        x = x + linear(f"layers.{i}.down_proj", F.gelu(inner))
    expected = linear("projector.2", F.gelu(linear("projector.0", norm("norm", x))))
    torch.testing.assert_close(encoder(image)[0], expected, atol=1e-5, rtol=1e-5)


def test_an_image_does_not_depend_on_the_batch_but_each_row_on_all_its_patches(encoder):
    images = pixels(3)
    together = encoder(images)
    for index in range(3):
        torch.testing.assert_close(encoder(images[index : index + 1])[0], together[index], atol=1e-5, rtol=1e-5)
    changed = images.clone()
    changed[0, :, -1, -1] += 1.0
    moved = (encoder(changed) - together).abs().amax(-1)
    assert (moved[0] > 1e-6).all()
    assert (moved[1:] < 1e-6).all()


def test_training_and_inference_agree_and_every_weight_can_learn(encoder):
    torch.testing.assert_close(encoder.train()(pixels()), encoder.eval()(pixels()))
    encoder(pixels()).square().sum().backward()
    assert [name for name, p in encoder.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_saved_encoder_comes_back_the_same(encoder, tmp_path):
    encoder.save(tmp_path / "encoder")
    loaded = VisionEncoder.load(tmp_path / "encoder")
    assert loaded.config == encoder.config
    assert torch.equal(loaded(pixels()), encoder(pixels()))
    assert loaded.revision() == encoder.revision()
    assert not any(p.requires_grad for p in loaded.parameters())


def test_the_revision_names_sizes_and_values(encoder):
    before = encoder.revision()
    assert len(before) == 32
    with torch.no_grad():
        encoder.positions[3, 5] += 1e-3
    assert encoder.revision() != before
    torch.manual_seed(0)
    heads = VisionEncoder(VisionConfig(**(SIZES | {"heads": 8})))  # the same weights, another function
    assert heads.revision() != before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"junk"), "model.safetensors"),
        (lambda d: (d / "config.json").write_text("{"), "config.json"),
        (lambda d: (d / "config.json").write_text('{"model_type": "llama"}'), "not the config of a vision encoder"),
        (lambda d: edit(d, layers=3), "model.safetensors.*Missing key"),
        (lambda d: edit(d, depth=3), "config.json.*depth"),
        (lambda d: edit(d, patch_size=5), "config.json.*does not divide"),
    ],
)
def test_a_broken_directory_is_refused_by_file(encoder, tmp_path, change, says):
    encoder.save(tmp_path)
    change(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"(?s){says}"):
        VisionEncoder.load(tmp_path)


def edit(directory, **changed):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
