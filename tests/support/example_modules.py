"""The modules of one example, importable by their plain names, of which several examples have the same."""

import sys
from pathlib import Path

import pytest


def make_importable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """For the length of a test, `import train` is this folder's, whoever imported another's before."""
    monkeypatch.syspath_prepend(str(folder))
    for path in folder.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
