"""One timer for the heartbeats of all sessions, which share the wake-ups of their event loop.

A wake-up of an idle process costs more than what a session does in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from moiety_platform.shared_wake_ups import process_phase_s
from moiety_wire.messages import HEARTBEAT_INTERVAL_S

SLOT_S = 0.05
NUM_SLOTS = round(HEARTBEAT_INTERVAL_S / SLOT_S)
SESSIONS_A_SLOT = 64  # in one turn of the event loop, as long as there is another slot

log = structlog.get_logger(__name__)

Tick = Callable[[], None]


class SessionTimer:
    """Timer that calls each function added to it once in HEARTBEAT_INTERVAL_S. Owned by the clients' owner."""

    def __init__(self) -> None:
        self._slots: list[dict[Tick, None]] = [{} for _ in range(NUM_SLOTS)]
        self._handles: dict[int, asyncio.TimerHandle] = {}

    def add(self, tick: Tick) -> None:
        """Call `tick` from now on, in the current event loop, in the first slot that is not full."""
        counts = [len(slot) for slot in self._slots]
        with_room = (index for index, count in enumerate(counts) if count < SESSIONS_A_SLOT)
        number = next(with_room, counts.index(min(counts)))
        self._slots[number][tick] = None
        if number not in self._handles:
            self._schedule(number)

    def remove(self, tick: Tick) -> None:
        """Stop calling `tick`. No effect if it was not added."""
        for number, slot in enumerate(self._slots):
            if tick in slot:
                del slot[tick]
                if not slot:
                    self._handles.pop(number).cancel()

    def _schedule(self, number: int) -> None:
        """Schedule the next turn of a slot. The first slot shares the wake-ups of the periodic tasks."""
        loop = asyncio.get_running_loop()
        offset_s = process_phase_s() + number * SLOT_S
        turns = (loop.time() - offset_s) // HEARTBEAT_INTERVAL_S + 1
        self._handles[number] = loop.call_at(turns * HEARTBEAT_INTERVAL_S + offset_s, self._turn, number)

    def _turn(self, number: int) -> None:
        self._schedule(number)
        for tick in list(self._slots[number]):
            try:
                tick()
            except Exception:  # top level of a timer: an error of one session must not delay the heartbeats of others
                log.exception("session_tick_failed")
