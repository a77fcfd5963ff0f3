"""Reasoning effort, a field of several APIs' request bodies."""

from __future__ import annotations

from typing import Annotated, Literal

from moiety_platform.inference.field_support import mapped

# "none": no reasoning. Each model has some of the levels.
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
    mapped("The nearest level that the model's chat template knows is used."),
]
