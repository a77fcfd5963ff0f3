"""Time that the vision encoder takes on its device, measured without waiting for the device."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class EncoderTimer:
    """Seconds of all encodings. On a GPU, those that still run are added once they have ended.

    Every measurement drops the events of those that have ended, so that ranks whose figures are not read keep few, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Measure what the body computes or queues on the device."""
        if self._is_gpu:
            begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begun.record()
            yield
            ended.record()
            self._add_ended()
            self._running.append((begun, ended))
        else:
            begun_s = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun_s

    def seconds_total(self) -> float:
        """Return the seconds of the encodings that have ended."""
        self._add_ended()
        return self._seconds

    def _add_ended(self) -> None:
        while self._running and self._running[0][1].query():  # type: ignore[no-untyped-call]
            begun, ended = self._running.popleft()
            self._seconds += begun.elapsed_time(ended) / 1e3
