"""Paths of the admin API."""

from __future__ import annotations

from urllib.parse import quote


def path_of(*segments: object) -> str:
    """Return a path whose segments are names and ids, whatever they contain."""
    return "".join(f"/{quote(str(one), safe='')}" for one in segments)
