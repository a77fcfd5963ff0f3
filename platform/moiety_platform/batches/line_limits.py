"""Limits of a batch's number of requests, and of each line of its input file.

`files/file_limits.py` limits the size of the file.
"""

from __future__ import annotations

from dataclasses import dataclass

from moiety_platform.inference.shape_limits import ShapeLimits
from moiety_platform.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class BatchLineLimits:
    """Limits of the lines of an input file."""

    max_lines: int
    max_line_bytes: int
    max_json_depth: int
    shape: ShapeLimits

    @classmethod
    def of(cls, settings: GatewaySettings) -> BatchLineLimits:
        return cls(settings.max_batch_lines, settings.max_body_bytes, settings.max_json_depth, ShapeLimits.of(settings))
