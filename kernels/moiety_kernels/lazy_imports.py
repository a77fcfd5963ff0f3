"""Lazy imports of implementation modules.

`cpu` needs numba, which a GPU does not use. `kernel` needs Triton, which a CPU does not use and need not have
installed.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def lazy_import(package: str, name: str) -> Callable[[], ModuleType]:
    """Return a function that imports the package's module of that name on its first call."""
    return functools.cache(functools.partial(importlib.import_module, f"{package}.{name}"))
