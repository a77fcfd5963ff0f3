"""Where a process's settings come from, to be read again: one file, and what beats it. Knows no process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import AliasChoices, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource

from moiety_platform.config_file import ConfigFileError, read_config_section

S = TypeVar("S", bound=BaseSettings)
Mark = tuple[tuple[int, int, int] | None, ...]  # of each file its inode, time and size; None where it is not there


class BadSettings(Exception):
    """What a file says is not what the process takes; the message says all that is wrong."""


class SettingOrigin(StrEnum):
    """What a setting's value is from; what stands first beats the rest."""

    OPTION = "option"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True)
class SettingsSource(Generic[S]):
    """`first` are the settings as they were read at the start, `mark` is that of the file just before, `had_table` says
    whether it had the process's table. `options` and `environment` name what beats the file."""

    path: Path | None
    section: str
    load: Callable[[], S]
    first: S
    options: frozenset[str]
    environment: frozenset[str]
    mark: Mark
    had_table: bool

    @classmethod
    def open(
        cls, path: Path | None, section: str, load: Callable[[], S], options: Iterable[str] = ()
    ) -> SettingsSource[S]:
        """`load` reads the file and what beats it. Raises what it raises."""
        mark = mark_of([path] if path is not None else [])
        first = load()
        had_table = path is not None and section in read_config_section(path, None)
        return cls(path, section, load, first, frozenset(options), _in_environment(type(first)), mark, had_table)

    def read(self) -> S:
        """The settings as the file says them now. Raises BadSettings; for an empty file too, which is one that somebody
        is about to write."""
        assert self.path is not None, "there is something to read again"
        try:
            tables = read_config_section(self.path, None)
            if not tables or (self.had_table and self.section not in tables):
                raise BadSettings(
                    f"{self.path} has no table {self.section!r}; write `{self.section}: {{}}` if none is set"
                )
            return self.load()
        except ConfigFileError as exc:
            raise BadSettings(str(exc)) from exc
        except ValidationError as exc:
            raise BadSettings(complaints(exc)) from exc

    def origins(self) -> Callable[[str], SettingOrigin]:
        """Where each setting is from, as the file is now; of one that cannot be read, as if it were empty."""
        try:
            named = read_config_section(self.path, self.section) if self.path is not None else {}
        except ConfigFileError:
            named = {}

        def origin_of(name: str) -> SettingOrigin:
            if name in self.options:
                return SettingOrigin.OPTION
            if name in self.environment:
                return SettingOrigin.ENVIRONMENT
            return SettingOrigin.FILE if name in named else SettingOrigin.DEFAULT

        return origin_of


def _in_environment(model: type[BaseSettings]) -> frozenset[str]:
    """The settings that the environment names."""
    found: dict[str, Any] = EnvSettingsSource(model)()

    def is_found(name: str) -> bool:
        alias = model.model_fields[name].validation_alias
        names = alias.choices if isinstance(alias, AliasChoices) else [name]
        return any(one in found for one in (name, *map(str, names)))

    return frozenset(filter(is_found, model.model_fields))


def complaints(error: ValidationError) -> str:
    """All that is wrong, without the values, of which some are secrets."""
    found = error.errors(include_url=False, include_input=False)
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'settings'}: {one['msg']}" for one in found)


def mark_of(paths: Collection[Path]) -> Mark:
    """Changes whenever a file is written, replaced, or another one stands behind its link."""
    return tuple(_mark(path) for path in paths)


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
