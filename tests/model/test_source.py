"""What a model name resolves to, and what is said when it cannot be had."""

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from izh.errors import ModelLoadError
from izh.model.source import resolve


def test_directory_is_named_after_its_last_part(tmp_path):
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    source = resolve(f"{directory}/")
    assert (source.path, source.name, source.kind) == (directory, "my-model", "directory")


def test_gguf_file_is_named_after_its_stem(tmp_path):
    path = tmp_path / "small.Q4_1.gguf"
    path.touch()
    source = resolve(str(path))
    assert (source.path, source.name, source.kind) == (path, "small.Q4_1", "gguf")


def test_hub_id_is_fetched_with_only_the_files_that_are_read(tmp_path, monkeypatch):
    asked = {}

    def download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = resolve("somebody/some-model", "v2")
    assert (source.path, source.name, source.kind) == (tmp_path, "some-model", "directory")
    assert (asked["repo_id"], asked["revision"]) == ("somebody/some-model", "v2")
    assert {"*.json", "*.safetensors", "*.jinja"} <= set(asked["allow_patterns"])
    assert "consolidated*" in asked["ignore_patterns"]
    assert not any(pattern.endswith((".bin", ".pth", "*")) for pattern in asked["allow_patterns"])


def test_hub_id_that_cannot_be_had_says_what_to_run(monkeypatch):
    def offline(*_, **__):
        raise LocalEntryNotFoundError("nothing here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelLoadError, match="hf download somebody/none --revision v2"):
        resolve("somebody/none", "v2")


@pytest.mark.parametrize("model", ["/no/such/place", "./missing", "missing.gguf", "a/b/c"])
def test_paths_that_do_not_exist_are_not_looked_up_on_the_hub(model, monkeypatch):
    def download(*_, **__):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelLoadError, match="no such file or directory"):
        resolve(model)


def test_directories_and_files_that_are_no_models_are_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        resolve(str(tmp_path))
    other = tmp_path / "weights.bin"
    other.touch()
    with pytest.raises(ModelLoadError, match=r"not a \.gguf file"):
        resolve(str(other))
