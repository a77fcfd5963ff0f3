"""Loading of all tables of the platform."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

PACKAGE = "moiety_platform"
MODELS = "models"  # module of a package's tables


def load_tables() -> None:
    """Import the module `models` of every package, nested ones too, so that `Base.metadata` has every table."""
    (root,) = map(Path, import_module(PACKAGE).__path__)
    for file in sorted(root.rglob(f"{MODELS}.py")):
        import_module(".".join((PACKAGE, *file.relative_to(root).with_suffix("").parts)))
