"""Models in the forms that peers read: GGUF files are read back, exports are asked of the right interpreter."""

import stat
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from izh.bench.peers import forms
from izh.errors import OptionError
from izh.model.source import ModelSource

WIDTH, ROWS = 64, 8


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IZH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A file as llama.cpp's converter writes it, with 4-bit, float16 and float32 tensors; and its weights."""
    random = np.random.default_rng(0)
    plain = {
        "blk.0.attn_q.weight": random.standard_normal((ROWS, WIDTH), np.float32),
        "token_embd.weight": random.standard_normal((ROWS, 16), np.float32),  # rows too short for a block of 32
        "blk.0.attn_norm.weight": random.standard_normal(WIDTH, np.float32),
    }
    kinds = {
        "blk.0.attn_q.weight": GGMLQuantizationType.Q4_1,
        "token_embd.weight": GGMLQuantizationType.F16,
        "blk.0.attn_norm.weight": GGMLQuantizationType.F32,
    }
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_context_length(512)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<s>", "a", "é"])
    writer.add_token_types([3, 1, 1])
    writer.add_add_bos_token(False)
    writer.add_file_type(3)
    for name, values in plain.items():
        writer.add_tensor(name, quantize(values, kinds[name]), raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, {name: dequantize(quantize(values, kinds[name]), kinds[name]) for name, values in plain.items()}


def read(path: Path) -> dict[str, tuple[GGMLQuantizationType, np.ndarray]]:
    tensors = GGUFReader(path).tensors
    return {each.name: (each.tensor_type, dequantize(each.data, each.tensor_type)) for each in tensors}


def test_f32_holds_the_very_weights(small: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    source, weights = small
    forms.convert(source, "gguf-f32", tmp_path / "f32.gguf")
    found = read(tmp_path / "f32.gguf")
    assert list(found) == list(weights)
    for name, (kind, values) in found.items():
        assert kind == GGMLQuantizationType.F32
        np.testing.assert_array_equal(values, weights[name])


def test_q8_0_is_off_by_half_a_step_at_most(small: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    source, weights = small
    forms.convert(source, "gguf-q8_0", tmp_path / "q8.gguf")
    found = read(tmp_path / "q8.gguf")
    kind, values = found["blk.0.attn_q.weight"]
    assert kind == GGMLQuantizationType.Q8_0
    wanted = weights["blk.0.attn_q.weight"]
    largest = np.abs(wanted.reshape(ROWS, -1, 32)).max(axis=-1, keepdims=True)
    off = np.abs(values - wanted).reshape(ROWS, -1, 32)
    # Half a step of max/127, and what float16 loses of the step, 127 times.
    assert (off <= largest * (0.5 / 127 + 2**-11)).all()
    assert off.max() > 0
    for name in ("token_embd.weight", "blk.0.attn_norm.weight"):
        assert found[name][0] == GGMLQuantizationType.F32
        np.testing.assert_array_equal(found[name][1], weights[name])


def test_metadata_is_copied_but_for_the_type(small: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    source, _ = small
    forms.convert(source, "gguf-q8_0", tmp_path / "q8.gguf")
    before, after = (
        {name: f.contents() for name, f in GGUFReader(p).fields.items()} for p in (source, tmp_path / "q8.gguf")
    )
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == {"general.file_type"}
    assert after["general.file_type"] == 7
    assert after["tokenizer.ggml.tokens"] == ["<s>", "a", "é"]


def test_a_form_is_made_once_for_each_content(small: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    path, _ = small
    source = ModelSource(path=path, name="small", kind="gguf")
    first = forms.form_of(source, "gguf-f32", tmp_path)
    stamp = first.stat().st_mtime_ns
    assert forms.form_of(source, "gguf-f32", tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    forms.convert(path, "gguf-f32", tmp_path / "again.gguf")
    path.write_bytes((tmp_path / "again.gguf").read_bytes())
    assert forms.form_of(source, "gguf-f32", tmp_path) != first


def test_openvino_files_come_from_its_own_exporter(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, tools = tmp_path / "model", tmp_path / "tools"
    model.mkdir()
    tools.mkdir()
    (model / "config.json").write_text("{}")
    exporter = tools / "optimum-cli"
    exporter.write_text('#!/bin/sh\nfor last; do :; done\necho "$@" > "$last/asked"\n')
    exporter.chmod(exporter.stat().st_mode | stat.S_IEXEC)
    source = ModelSource(path=model, name="m", kind="directory")
    made = forms.form_of(source, "openvino-int8", tools / "python")
    assert (made / "asked").read_text().startswith("export openvino --task text-generation-with-past --model")
    assert "--weight-format int8" in (made / "asked").read_text()
    exporter.write_text("#!/bin/sh\nexit 5\n")
    with pytest.raises(OptionError, match="status 5"):
        forms.form_of(source, "openvino-fp32", tools / "python")


def test_what_cannot_be_made_is_said(small: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    directory = ModelSource(path=tmp_path, name="other", kind="directory")
    with pytest.raises(OptionError, match="no GGUF file of other"):
        forms.form_of(directory, "gguf-f32", tmp_path)
    assert forms.form_of(directory, "hf", tmp_path) == tmp_path
    with pytest.raises(OptionError, match=r"small\.gguf is a GGUF file"):
        forms.form_of(ModelSource(path=small[0], name="small", kind="gguf"), "openvino-int8", tmp_path)
