"""Whether an engine sleeps, and whether it is to: from the one to the other, a command at a time."""

from __future__ import annotations

from moiety_engine.messages import CoreSleep, CoreSlept
from moiety_wire.figures import SleepState


class SleepMode:
    """What was asked for last counts, also while the core is still busy with what was asked for before."""

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
        """What the core is to be told now, if anything; it falls asleep when nothing is open any more."""
        if self._core_is_busy or self._is_asleep == self._is_to_sleep or (self._is_to_sleep and num_open):
            return None
        self._core_is_busy = True
        return CoreSleep(self._is_to_sleep)

    def done(self, message: CoreSlept) -> None:
        self._core_is_busy = False
        self._is_asleep = message.asleep
        if message.problem:
            self.problem = message.problem
            self._is_to_sleep = message.asleep  # it is not tried for ever
