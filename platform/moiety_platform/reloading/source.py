"""Source of a process's settings for repeated reads: one file, and the values that override it. Knows no process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource

from moiety_platform.config_file import ConfigFileError, read_config_section

S = TypeVar("S", bound=BaseSettings)
Mark = tuple[tuple[int, int, int] | None, ...]  # inode, time and size of each file; None for a missing file


class BadSettings(Exception):
    """The file contains invalid settings; the message lists every problem."""


class SettingOrigin(StrEnum):
    """Origin of a setting's value, in the order of precedence."""

    OPTION = "option"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True)
class SettingsSource(Generic[S]):
    """File of the settings and the overrides.

    `first` are the settings read at the start, `mark` is the mark of the file just before, `had_table` says whether it
    had the process's table. `options` and `environment` name the settings that override the file.
    """

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
        """Read the settings with `load`, which reads the file and its overrides. Raises the errors of `load`."""
        mark = mark_of([path] if path is not None else [])
        first = load()
        had_table = path is not None and section in read_config_section(path, None)
        return cls(path, section, load, first, frozenset(options), _in_environment(type(first)), mark, had_table)

    def read(self) -> S:
        """Return the current settings of the file. Raises BadSettings.

        An empty file also raises, since it is probably being written.
        """
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
        """Return a function from a setting to its origin in the current file. An unreadable file counts as empty."""
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
    """Return the names of the settings in the environment."""
    source = EnvSettingsSource(model)
    fields = model.model_fields.items()
    return frozenset(name for name, field in fields if source.get_field_value(field, name)[0] is not None)


def complaints(error: ValidationError) -> str:
    """Return all validation errors, without the values, some of which are secrets."""
    found = error.errors(include_url=False, include_input=False)
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'settings'}: {one['msg']}" for one in found)


def mark_of(paths: Collection[Path]) -> Mark:
    """Return a mark that changes whenever a file is written, replaced, or its link gets another target."""
    return tuple(_mark(path) for path in paths)


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
