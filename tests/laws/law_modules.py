"""What the laws are checked against: the package's modules and what each imports, read from the source text.

An import is run-time when importing or running the module may execute it; imports under `if TYPE_CHECKING` are not.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "izh"


@dataclass(frozen=True)
class Import:
    """`target` as written: 'izh.cache.blocks', 'torch.nn'; for `from a import b` also a.b when that is a module."""

    target: str
    line: int
    is_run_time: bool


@dataclass(frozen=True)
class Module:
    """A module of the package: `name` is dotted, 'izh.cache.blocks'; a package's own name stands for its __init__."""

    name: str
    path: Path
    tree: ast.Module
    imports: tuple[Import, ...]


@cache
def modules() -> dict[str, Module]:
    """All modules of the package, by dotted name."""
    paths = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: read(name, path.read_text(), path, frozenset(paths)) for name, path in paths.items()}


def read(name: str, text: str, path: Path, known: frozenset[str]) -> Module:
    """Parse one module. `known`: the names that are modules, to tell a submodule from any other name."""
    tree = ast.parse(text, str(path))
    return Module(name, path, tree, tuple(_imports(tree, known, is_run_time=True)))


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(node: ast.AST, known: frozenset[str], is_run_time: bool) -> list[Import]:
    found: list[Import] = []
    if isinstance(node, ast.Import):
        found += [Import(alias.name, node.lineno, is_run_time) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: relative imports hide the layer"
        assert node.module is not None
        submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known
        found += [Import(target, node.lineno, is_run_time) for target in sorted(submodules | {node.module})]
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        found += [each for child in node.body for each in _imports(child, known, is_run_time=False)]
        found += [each for child in node.orelse for each in _imports(child, known, is_run_time)]
    else:
        found += [each for child in ast.iter_child_nodes(node) for each in _imports(child, known, is_run_time)]
    return found
