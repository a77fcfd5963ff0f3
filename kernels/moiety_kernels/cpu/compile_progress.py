"""Progress of the compilation of CPU kernels, for whoever waits for it. Does not load the compiler."""

from __future__ import annotations

from collections.abc import Callable


class CompileProgress:
    """Number of functions that this process compiled; those that come from the cache on disk are not counted."""

    def __init__(self) -> None:
        self.num_compiled = 0
        self.report: Callable[[int], None] | None = None  # called with the number after each function

    def add(self) -> None:
        """Count a function that was just compiled."""
        self.num_compiled += 1
        if self.report is not None:
            self.report(self.num_compiled)


progress = CompileProgress()
