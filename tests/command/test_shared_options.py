"""An option of `moiety serve` that `moiety engine` has takes the same values."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, get_args, get_type_hints

import pytest

from moiety_engine.bench.cli import bench_engine
from moiety_engine.cli import engine
from moiety_platform.cli.serve import serve


def choices_of(function: Any) -> dict[str, type[StrEnum]]:
    """Return the enumeration of each option of a command that has one."""
    found = {}
    for name, hint in get_type_hints(function).items():
        for one in (hint, *get_args(hint)):
            if isinstance(one, type) and issubclass(one, StrEnum):
                found[name] = one
    return found


@pytest.mark.parametrize("function", [serve, bench_engine], ids=["serve", "bench engine"])
def test_commands_share_the_values_of_their_options(function: Any) -> None:
    shared = choices_of(function)
    assert {"device", "dtype", "quantization", "moe_kernel", "batching", "load_format"} <= shared.keys()
    of_engine = choices_of(engine)
    assert shared == {name: of_engine[name] for name in shared}
