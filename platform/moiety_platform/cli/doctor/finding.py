"""Findings of a check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from moiety_platform.redaction import hide_url_passwords


class Severity(StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """Result of one check. `code` is stable, for programs; `advice` says what to do; `command` does it, if one can.

    Passwords in the URLs of its texts are hidden.
    """

    area: str
    code: str
    level: Severity
    found: str
    advice: str = ""
    command: str = ""

    def __post_init__(self) -> None:
        for name in ("found", "advice", "command"):
            object.__setattr__(self, name, hide_url_passwords(getattr(self, name)))

    def as_json(self) -> dict[str, Any]:
        return {name: value or None for name, value in asdict(self).items()}


def ok(area: str, code: str, found: str) -> Finding:
    return Finding(area, code, Severity.OK, found)


def warn(area: str, code: str, found: str, advice: str, command: str = "") -> Finding:
    return Finding(area, code, Severity.WARNING, found, advice, command)


def fail(area: str, code: str, found: str, advice: str, command: str = "") -> Finding:
    return Finding(area, code, Severity.ERROR, found, advice, command)
