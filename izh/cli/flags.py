"""Option dataclasses to flags, and flags back to option dataclasses.

Owns: the one rule by which a field becomes a flag: `kv_cache_gb: float | None` is `--kv-cache-gb NUMBER`, a bool is
`--name/--no-name`, a `repeat` tuple is a flag that may be given many times.
Must not know: any particular option or command.
Invariant: every field of every group has exactly one flag, with a help line that says what happens without it.
"""

import argparse
import types
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Options = TypeVar("Options")

ALIASES = {"model": ("--model-dir",)}
"""Further spellings of a field's flag."""

_METAVARS = {int: "N", float: "NUMBER", str: "TEXT"}


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def groups_of(cls: type) -> list[type]:
    """The dataclasses that `cls` is made of, as written: its bases that hold options, or `cls` itself."""
    bases = [base for base in cls.__bases__ if is_dataclass(base)]
    return [group for base in bases for group in groups_of(base)] or [cls]


def add_flags(parser: argparse.ArgumentParser, *options: type) -> None:
    """Give `parser` a flag for every field of the option dataclasses, one help section per group."""
    for group in (group for cls in options for group in groups_of(cls)):
        section = parser.add_argument_group((group.__doc__ or group.__name__).split("\n")[0].rstrip("."))
        hints = get_type_hints(group)
        for field in fields(group):
            _add_flag(section, field, hints[field.name])


def take(cls: type[Options], arguments: argparse.Namespace) -> Options:
    """The option dataclass from parsed flags."""
    values = {}
    for field in fields(cls):  # type: ignore[arg-type]  # a TypeVar cannot be bound to "some dataclass"
        value = getattr(arguments, field.name)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def _add_flag(section: Any, field: Field[Any], hint: Any) -> None:
    assert field.default is not MISSING, f"option {field.name} has no default"
    names = (flag_of(field.name), *ALIASES.get(field.name, ()))
    common = {"dest": field.name, "default": field.default, "help": _help(field)}
    kind = _plain_type(hint)
    if kind is bool:
        section.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
        return
    choices = field.metadata["choices"]
    metavar = "{" + ",".join(choices) + "}" if choices else _METAVARS[kind]
    action = _Repeat if field.metadata["repeat"] else "store"
    section.add_argument(*names, action=action, type=kind, choices=choices, metavar=metavar, **common)


def _plain_type(hint: Any) -> type:
    """int of `int`, `int | None` and `tuple[int, ...]`."""
    if isinstance(hint, types.UnionType):
        (hint,) = (arg for arg in get_args(hint) if arg is not types.NoneType)
    kind: type = get_args(hint)[0] if get_origin(hint) is tuple else hint
    assert kind in (bool, int, float, str), f"no flag can spell {hint}"
    return kind


def _help(field: Field[Any]) -> str:
    """The field's help line, with its default unless that is None (then the line itself says what None means)."""
    text: str = field.metadata["help"]
    if field.default is not None and field.default != ():
        text += f" (default: {_shown(field.default)})"
    return text.replace("%", "%%")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


class _Repeat(argparse.Action):
    """Collects the values of a flag given many times. The first one replaces the default instead of joining it."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        so_far = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [values] if so_far is self.default else [*so_far, values])
