"""Charts of the report, as PNG, drawn from its JSON alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw_charts(report: dict[str, Any], folder: Path) -> dict[str, str]:
    return {}
