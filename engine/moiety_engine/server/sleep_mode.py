"""Sleep mode of an engine: its actual and its requested state, and the commands that change it, one at a time."""

from __future__ import annotations

from moiety_engine.messages import CoreSleep, CoreSlept
from moiety_wire.engine_load import SleepState


class SleepMode:
    """State machine of sleep mode. The last request counts, even while the core executes an earlier command."""

    def __init__(self) -> None:
        self._is_asleep = False
        self._is_to_sleep = False
        self._core_is_busy = False
        self.problem = ""

    @property
    def state(self) -> SleepState:
        if self._is_asleep:
            stays = self._is_to_sleep and not self._core_is_busy
            return SleepState.ASLEEP if stays else SleepState.WAKING
        stays = not self._is_to_sleep and not self._core_is_busy
        return SleepState.AWAKE if stays else SleepState.FALLING_ASLEEP

    def ask(self, *, asleep: bool) -> None:
        self._is_to_sleep = asleep
        self.problem = ""

    def next_command(self, num_open: int) -> CoreSleep | None:
        """Return the command for the core, if any. The core falls asleep only when no request is open."""
        if self._core_is_busy or self._is_asleep == self._is_to_sleep or (self._is_to_sleep and num_open):
            return None
        self._core_is_busy = True
        return CoreSleep(self._is_to_sleep)

    def done(self, message: CoreSlept) -> None:
        self._core_is_busy = False
        self._is_asleep = message.asleep
        if message.problem:
            self.problem = message.problem
            self._is_to_sleep = message.asleep  # do not retry forever
