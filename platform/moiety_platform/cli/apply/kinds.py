"""Kinds of objects that a file can declare, from the catalog of resources."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from moiety_platform.administration.catalog import RESOURCES
from moiety_platform.cli.lazy import load_target
from moiety_platform.resources.apply_kind import ApplyKind


@cache
def apply_kinds() -> Mapping[str, ApplyKind]:
    """Return the kinds by name, in the order in which objects are created."""
    kinds: list[ApplyKind] = [load_target(one.apply_kind) for one in RESOURCES if one.apply_kind]
    return MappingProxyType({one.kind: one for one in kinds})
