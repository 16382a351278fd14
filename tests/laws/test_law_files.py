"""What every file owes its reader: a header, a size one can hold in mind, and no loose ends."""

import ast
import re
import shutil
import subprocess

import pytest
from law_modules import ROOT, modules

MAX_LINES = 400
# Spelled in pieces, so that this file passes its own law.
LOOSE_ENDS = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")
MACHINE_PATH = re.compile(r"(?<![\w.\-~$}])/(?:" + "|".join(("home", "root", "tmp", "work", "Users")) + r")/\w")
# A silenced checker with nothing but its codes up to the end of the line.
SILENCED = re.compile(r"#\s*(?:type: ignore(?:\[[\w, -]+\])?|noqa(?::[\sA-Z0-9,]+)?)\s*$")


def tracked_texts() -> dict[str, str]:
    """Every text file under version control, by its path from the root."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing tells which files belong to the project")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    texts = {}
    for name in listed.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file():
            raw = path.read_bytes()
            if b"\0" not in raw:
                texts[name] = raw.decode()
    assert "pyproject.toml" in texts
    return texts


def test_every_module_opens_with_a_header() -> None:
    """An empty __init__.py has nothing to tell."""
    bare = [m.name for m in modules().values() if m.tree.body and not ast.get_docstring(m.tree)]
    assert bare == []


def test_no_module_is_too_long() -> None:
    lengths = {m.name: len(m.path.read_text().splitlines()) for m in modules().values()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_loose_ends() -> None:
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in tracked_texts().items()
        for number, line in enumerate(text.splitlines(), 1)
        if LOOSE_ENDS.search(line)
    ]
    assert found == []


def test_no_machine_paths() -> None:
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in tracked_texts().items()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_what_silences_a_checker_says_why() -> None:
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in tracked_texts().items()
        if name.endswith(".py")
        for number, line in enumerate(text.splitlines(), 1)
        if SILENCED.search(line)
    ]
    assert found == []


def test_the_patterns_bite() -> None:
    assert LOOSE_ENDS.search("# TO" + "DO: later")
    assert MACHINE_PATH.search('open("/' + 'tmp/x")')
    assert MACHINE_PATH.search("cd /" + "home/me")
    assert not MACHINE_PATH.search("https://example.com/home/page")
    assert not MACHINE_PATH.search("a/tmp/b")
    assert SILENCED.search("x = 1  # no" + "qa: E501")
    assert SILENCED.search("x = 1  # type: " + "ignore[assignment]")
    assert not SILENCED.search("x = 1  # type: ignore[assignment]  # the stub is wrong")
