"""The eyes that come with the demo model: whole, small, and made for it."""

import json

from izh.model.demo import demo_vision
from izh.model.load import load_spec
from izh.model.source import resolve
from izh.multimodal import VisionPath
from izh.text.tokenizer import Tokenizer


def test_they_are_small_and_say_only_what_they_are() -> None:
    files = {file.name: file for file in demo_vision().iterdir()}
    assert set(files) == {"config.json", "model.safetensors", "path.json", "digit.png", "shapes.png"}
    assert sum(file.stat().st_size for file in files.values()) < 8_000_000
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in files.values())
    assert set(json.loads(files["path.json"].read_text())) == {"placeholder", "sections", "pixels"}


def test_they_fit_the_model() -> None:
    source = resolve("demo")
    path, spec = VisionPath.load(demo_vision(), Tokenizer.load(source.path)), load_spec(source)
    assert path.encoder.config.output_width == spec.hidden_size
    assert 2 * sum(path.sections) == spec.ropes[0].rotary_dim
    assert path.encoder.config.num_patches == 16
