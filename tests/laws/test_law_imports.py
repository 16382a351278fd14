"""Imports go downward only, features never meet, and what must stay free of torch is free of it."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from law_modules import ROOT, Module, modules, read

# From the bottom up. A rung may import the rungs below it; within a rung, only the modules of one part see each other.
# A part is a module at the top of the package, or a package with all that it holds.
RUNGS: tuple[frozenset[str], ...] = (
    frozenset({"version", "errors", "config", "request", "outputs", "logs"}),
    frozenset({"sequence", "batch", "seams"}),
    frozenset({"kernels"}),
    frozenset({"text", "cache", "model"}),
    frozenset({"schedule"}),
    frozenset({"multimodal", "adapters", "sampling", "pooling"}),
    frozenset({"runner"}),
    frozenset({"engine"}),
    frozenset({"server"}),
    frozenset({"llm", "offline", "cli", "cluster", "bench", "__main__", ""}),  # "": izh itself, the public names
)
FEATURES = RUNGS[5]
OPEN_RUNGS = (0, 1, 9)  # the vocabulary's files build on each other, and so do the faces
HAS_NO_TORCH = ("errors", "config", "request", "outputs", "logs", "sequence", "cache", "schedule", "text")


def part_of(name: str) -> str:
    """'cache' of 'izh.cache.blocks', '' of 'izh'."""
    return [*name.split("."), ""][1]


def rung_of(name: str) -> int | None:
    """The height of the rung that holds a module; None when the table does not know it."""
    return next((height for height, parts in enumerate(RUNGS) if part_of(name) in parts), None)


def uphill(module: Module) -> list[str]:
    """The module's imports that break the order, each as a line to read."""
    own = rung_of(module.name)
    assert own is not None
    broken = []
    for each in module.imports:
        if each.target.split(".")[0] != "izh":
            continue
        other = rung_of(each.target)
        is_same_part = part_of(each.target) == part_of(module.name)
        if is_same_part or (other is not None and (other < own or (other == own and own in OPEN_RUNGS))):
            continue
        broken.append(f"{module.name}:{each.line} imports {each.target}")
    return broken


def torch_path(name: str, all_modules: dict[str, Module], seen: set[str]) -> list[str] | None:
    """The chain of run-time imports that leads from a module to torch, or None."""
    seen.add(name)
    for each in all_modules[name].imports:
        if not each.is_run_time:
            continue
        if each.target.split(".")[0] == "torch":
            return [name, each.target]
        # Importing a.b.c runs a, a.b and a.b.c.
        words = each.target.split(".")
        for target in (".".join(words[: i + 1]) for i in range(len(words))):
            if target in all_modules and target not in seen:
                rest = torch_path(target, all_modules, seen)
                if rest is not None:
                    return [name, *rest]
    return None


def test_every_module_has_a_rung() -> None:
    assert [name for name in modules() if rung_of(name) is None] == []


def test_imports_go_downward() -> None:
    assert [line for module in modules().values() for line in uphill(module)] == []


@pytest.mark.parametrize("part", ["runner", "model", "schedule", "cache", "kernels", "text"])
def test_no_feature_below_the_engine(part: str) -> None:
    found = [
        f"{module.name}:{each.line} imports {each.target}"
        for module in modules().values()
        if part_of(module.name) == part
        for each in module.imports
        if each.target.startswith("izh.") and part_of(each.target) in FEATURES
    ]
    assert found == []


def test_only_build_knows_the_features() -> None:
    """Within the engine. (Features' own option and data types may be named by the faces above it.)"""
    found = {
        module.name
        for module in modules().values()
        if part_of(module.name) == "engine"
        for each in module.imports
        if each.target.startswith("izh.") and part_of(each.target) in FEATURES
    }
    assert found <= {"izh.engine.build"}


@pytest.mark.parametrize("part", HAS_NO_TORCH)
def test_source_leads_to_no_torch(part: str) -> None:
    names = [name for name in modules() if part_of(name) == part]
    assert names, f"izh.{part} is gone: take it out of HAS_NO_TORCH"
    paths = [torch_path(name, modules(), set()) for name in names]
    assert [" -> ".join(path) for path in paths if path] == []


def test_importing_loads_no_torch() -> None:
    """The same, observed: also a library that one of these modules imports must not bring torch in."""
    names = [name for name in modules() if part_of(name) in HAS_NO_TORCH]
    code = f"import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_importing_izh_is_light() -> None:
    """`import izh` and the command line's own modules load neither torch nor transformers nor numba."""
    code = (
        "import sys, izh, izh.cli\nizh.cli.parser.build_parser()\n"
        "print([name for name in ('torch', 'transformers', 'numba', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _module(name: str, text: str) -> Module:
    return read(name, text, Path(name), frozenset(modules()) | {name})


@pytest.mark.parametrize(
    ("name", "text", "is_allowed"),
    [
        ("izh.cache.x", "from izh.engine.core import EngineCore", False),
        ("izh.cache.x", "from izh import engine", False),
        ("izh.cache.x", "import izh.runner.runner", False),
        ("izh.cache.x", "def f():\n    import izh.server.app", False),
        ("izh.schedule.x", "if TYPE_CHECKING:\n    from izh.sampling.head import SamplingHead", False),
        ("izh.sampling.x", "from izh.adapters.bank import AdapterBank", False),
        ("izh.text.x", "from izh.model.source import resolve", False),
        ("izh.sampling.x", "from izh.sampling.y import z", True),
        ("izh.model.x", "from izh.kernels.ops import Ops", True),
        ("izh.sequence", "from izh.request import Request", True),
        ("izh.server.x", "from izh.engine.async_llm import AsyncLLM", True),
    ],
)
def test_the_law_bites(name: str, text: str, is_allowed: bool) -> None:
    assert (uphill(_module(name, text)) == []) is is_allowed


def test_the_torch_law_bites() -> None:
    a = _module("izh.cache.a", "from izh.cache import b")
    b = _module("izh.cache.b", "def f():\n    import torch.nn")
    c = _module("izh.cache.c", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch")
    known = {"izh.cache.a": a, "izh.cache.b": b, "izh.cache.c": c, "izh.cache": _module("izh.cache", "")}
    a = read("izh.cache.a", "from izh.cache import b", Path("a"), frozenset(known))
    known["izh.cache.a"] = a
    assert torch_path("izh.cache.a", known, set()) == ["izh.cache.a", "izh.cache.b", "torch.nn"]
    assert torch_path("izh.cache.c", known, set()) is None


def test_every_library_is_declared() -> None:
    """What the package imports, pip installs; what one part alone needs, an extra does. (FastAPI is made of Starlette
    and Pydantic, numba of llvmlite, and each pins the versions it works with.) Drivers of peers run in environments of
    their own: `izh.bench.peers.catalogue` says what those hold."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = _names(project["dependencies"])
    optional = project["optional-dependencies"]
    extras = {"izh.kernels.triton": _names(optional["gpu"]), "izh.bench": _names(optional["bench"])}
    extras["izh.bench.peers"] = extras["izh.bench"]
    handed_on = {"starlette", "pydantic", "llvmlite"}
    distributions = packages_distributions()
    missing = {
        f"{module.name}:{each.line} imports {each.target}"
        for module in modules().values()
        if not module.name.startswith("izh.bench.peers.drivers.")
        for each in module.imports
        if (top := each.target.split(".")[0]) not in sys.stdlib_module_names | {"izh"} | handed_on
        and not (declared | extras.get(module.name.rpartition(".")[0], set()))
        & {_normal(name) for name in distributions.get(top, [top])}
    }
    assert missing == set()


def _names(requirements: list[str]) -> set[str]:
    """The distributions that requirements name."""
    return {_normal(re.split(r"[^\w.-]", line)[0]) for line in requirements}


def _normal(name: str) -> str:
    """A distribution's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
