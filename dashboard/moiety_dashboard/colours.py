"""One colour per class and per outcome on every page, readable on light and dark backgrounds. Pure."""

from __future__ import annotations

from collections.abc import Iterable

SHIPPED = {"priority": "#8b5cf6", "standard": "#14a098", "flex": "#3b82d6", "batch": "#c08a2d"}
MORE = ("#d05a9a", "#7b8794", "#8aa036", "#b0724f", "#5b8def", "#a06cd5")  # for the operator's own classes
OUTCOMES = {"served": "#4f9d69", "disconnected": "#9aa0a6", "rejected": "#e0a526", "failed": "#d64545"}
TENANTS = ("#4c78a8", "#e1812c", "#54a24b", "#b279a2", "#72b7b2", "#eeca3b", "#9d755d", "#ff9da6")
LESS, EVEN, MORE_THAN = "#2f6fb5", "#a3a9b0", "#d9702a"  # relative to the mean; readable in both themes
PREFILL, DECODE = "#e1812c", "#4c78a8"
GOOD, WARN, BAD, NEUTRAL = "#4f9d69", "#e0a526", "#d64545", "#9aa0a6"


def of_classes(names: Iterable[str]) -> dict[str, str]:
    """Return the colours of these classes, in their order; those of custom classes follow their names' order."""
    names = list(names)
    own = sorted(name for name in names if name not in SHIPPED)
    return {name: SHIPPED.get(name) or MORE[own.index(name) % len(MORE)] for name in names}
