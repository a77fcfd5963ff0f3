"""Modules that are imported when they are first asked for: `cpu` needs numba, which a GPU has no use for, and `kernel`
Triton, which a CPU has none for and need not have installed."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def when_asked(package: str, name: str) -> Callable[[], ModuleType]:
    """What returns the package's module of that name."""
    return functools.cache(functools.partial(importlib.import_module, f"{package}.{name}"))
