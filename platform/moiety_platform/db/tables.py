"""Loading of all tables of the platform."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec

PACKAGE = "moiety_platform"
MODELS = "models"  # module of a package's tables


def load_tables() -> None:
    """Import the module `models` of every package that has one, so that `Base.metadata` has every table."""
    root = import_module(PACKAGE)
    for part in pkgutil.iter_modules(root.__path__, f"{PACKAGE}."):
        if part.ispkg and find_spec(f"{part.name}.{MODELS}") is not None:
            import_module(f"{part.name}.{MODELS}")
