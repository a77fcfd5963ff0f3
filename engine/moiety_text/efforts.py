"""Reasoning efforts: the levels that a chat template knows, and the nearest one to a level that a client asks for."""

from __future__ import annotations

from moiety_text.chat import ChatTemplate
from moiety_text.errors import TemplateRefused

EFFORT = "reasoning_effort"  # variable of templates
NO_EFFORT = "none"
LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")  # of all vendors, ascending
USUAL_LEVELS = ("low", "medium", "high")  # of templates that print whatever level they are given

_NO_LEVEL = "unknown-level"


def levels_of(template: ChatTemplate) -> tuple[str, ...]:
    """Return the levels that the template knows, ascending; none where it does not read an effort."""
    if EFFORT not in template.variables:
        return ()
    compared = tuple(level for level in LEVELS if level in template.compared_texts and _prompt(template, level))
    if compared:
        return compared
    printed = _prompt(template, _NO_LEVEL)
    return USUAL_LEVELS if printed is not None and _NO_LEVEL in printed else ()


def nearest_level(requested: str, levels: tuple[str, ...]) -> str:
    """Return the nearest of the levels, at least one; the lower one of two that are as near."""
    rank = LEVELS.index(requested)
    return min(levels, key=lambda level: (abs(LEVELS.index(level) - rank), LEVELS.index(level)))


def _prompt(template: ChatTemplate, level: str) -> str | None:
    """Return the prompt of a short conversation with that effort; None where the template refuses it."""
    try:
        return template.render([{"role": "user", "content": "Hi"}], extra={EFFORT: level})
    except TemplateRefused:
        return None
