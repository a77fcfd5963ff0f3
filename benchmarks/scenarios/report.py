from __future__ import annotations
from pathlib import Path
from typing import Any


def write_report(report: dict[str, Any], path: Path) -> None:
    pass
