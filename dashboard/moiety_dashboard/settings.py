"""The dashboard's settings, read once by its entry points. They contain no credential: that is the user's."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "MOIETY_URL"
DEFAULT_REFRESH_S = 3.0


_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^\s]+@")


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """The gateway's address and the refresh interval."""

    gateway_url: str = field(default=DEFAULT_URL, repr=False)  # may contain a password
    refresh_s: float = DEFAULT_REFRESH_S


def without_password(url: str) -> str:
    """Return a URL for display. A password may have any characters, also `/` and `@`."""
    return _PASSWORD.sub(r"\1…@", url)


def read_settings(arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> DashboardSettings:
    """Read settings from `--gateway URL --refresh-s N`, then the environment, then the defaults."""
    given = os.environ if environment is None else environment
    parser = argparse.ArgumentParser(prog="moiety dashboard", add_help=False)
    parser.add_argument("--gateway", default=given.get(URL_VARIABLE) or DEFAULT_URL)
    parser.add_argument("--refresh-s", type=float, default=DEFAULT_REFRESH_S)
    options = parser.parse_args(list(arguments))
    return DashboardSettings(options.gateway.rstrip("/"), options.refresh_s)
