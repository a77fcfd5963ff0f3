"""Declaration of an option as the field of a dataclass: default, help, bounds and environment variable.

The field's name and type are the rest of the declaration: `max_running: int | None` is the option `--max-running`, the
key `max_running` of the command's table in a configuration file, and `max-running` in the Helm chart's values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

KEY = "option"  # of a dataclass field's metadata


@dataclass(frozen=True, slots=True)
class Option:
    """Properties of an option in addition to the field's name, type and default.

    `env` is its environment variable, or a prefix that ends in `_` and is followed by the option's name.
    """

    help: str
    panel: str | None = None  # heading in `--help`
    env: str | None = None
    min: float | None = None
    max: float | None = None
    is_size: bool = False  # bytes, which may be written as 4GiB
    is_shown: bool = True
    flag: str | None = None  # instead of the field's name
    file_okay: bool = True
    dir_okay: bool = True


@dataclass(frozen=True, slots=True)
class DeclaredOption:
    """One option of a dataclass of options, complete. `type` has no None; `is_list`: it may be given several times."""

    name: str
    type: Any
    default: Any
    is_list: bool
    option: Option

    @property
    def flag(self) -> str:
        return self.option.flag or f"--{self.name.replace('_', '-')}"

    @property
    def negative_flag(self) -> str | None:
        """Return the flag that sets a boolean option to false; None for other types, or with a flag of its own."""
        return f"--no-{self.flag.removeprefix('--')}" if self.type is bool and self.option.flag is None else None

    @property
    def env(self) -> str | None:
        prefix = self.option.env
        return f"{prefix}{self.name.upper()}" if prefix and prefix.endswith("_") else prefix


def option(default: Any, help_text: str, **rest: Any) -> Any:
    """Declare an option. `rest`: further fields of `Option`."""
    return field(default=default, metadata={KEY: Option(help_text, **rest)})


def declared_options(options: type) -> Mapping[str, DeclaredOption]:
    """Return the options of a dataclass by name. Fields that are not declared by `option` are left out."""
    hints = get_type_hints(options)
    return {one.name: _declared(one, hints[one.name]) for one in fields(options) if KEY in one.metadata}


def _declared(one: Field[Any], hint: Any) -> DeclaredOption:
    assert one.default is not MISSING, f"{one.name} has a default"
    (kind,) = [part for part in get_args(hint) if part is not NoneType] if NoneType in get_args(hint) else [hint]
    is_list = getattr(kind, "__origin__", None) is list
    return DeclaredOption(one.name, get_args(kind)[0] if is_list else kind, one.default, is_list, one.metadata[KEY])
