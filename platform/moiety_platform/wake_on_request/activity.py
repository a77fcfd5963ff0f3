"""Observations of each engine by a gateway: when it last had requests, and since when it is awake.

An engine reports its requests of all gateways, so every gateway observes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from moiety_platform.engine_client.base import EngineState
from moiety_platform.wake_on_request.plan import SleepView
from moiety_wire.engine_load import Load, SleepState

REFUSED_S, MAX_REFUSED_S = 60.0, 3600.0  # pause after an engine could not follow a command, doubled each time
MAX_DOUBLINGS = 6  # which reach the longest pause
STALE_S = 1.5  # after a command, loads can still have the problem of an earlier one


@dataclass(slots=True)
class EngineActivity:
    """Observation of one engine, by the gateway's monotonic clock."""

    num_requests: int
    active_s: float  # when it last had a request
    awake_s: float  # since when it is awake
    sleep: SleepState
    command_s: float | None = None  # when this gateway sent it a command that it has not followed yet
    was_woken: bool = False  # by the last command
    refused_until_s: float = 0.0
    num_refusals: int = 0  # in a row
    gave_way_to: str = ""  # model for which it was put to sleep, until that model or the engine is awake


class ActivityLog:
    """Observations of the engines of this deployment. Owned by the waker."""

    def __init__(self, on_awake: Callable[[str, float], None]) -> None:
        """Create an empty log. `on_awake` gets the model of an engine that was woken, and how long that took."""
        self._on_awake = on_awake
        self._engines: dict[str, EngineActivity] = {}

    def observe(self, states: Iterable[EngineState], now_s: float) -> list[SleepView]:
        """Return the connected engines of this deployment, with their observations so far."""
        views = []
        for state in states:
            card, load = state.card, state.load
            if card is None or load is None or not state.healthy or load.draining or not card.extensible:
                continue
            found = self._engines.get(state.address)
            if found is None:
                found = EngineActivity(load.requests_total, now_s, now_s, load.sleep)
                self._engines[state.address] = found
            self._note(found, state, load, card.model, now_s)
            is_busy = found.active_s >= now_s
            views.append(
                SleepView(
                    state.address,
                    card.model,
                    load.sleep,
                    card.device_group,
                    card.role,
                    0.0 if is_busy else now_s - found.active_s,
                    now_s - found.awake_s,
                    card.generates and found.refused_until_s <= now_s,
                    found.gave_way_to,
                )
            )
        known = {state.address for state in states}
        self._engines = {address: one for address, one in self._engines.items() if address in known}
        awake = {(view.model, view.group) for view in views if view.sleep is SleepState.AWAKE}
        for number, view in enumerate(views):
            if view.gave_way_to and (view.gave_way_to, view.group) in awake:
                self._engines[view.address].gave_way_to = ""
                views[number] = msgspec.structs.replace(view, gave_way_to="")
        return views

    def sent(self, address: str, now_s: float, *, asleep: bool, gave_way_to: str = "") -> None:
        """Record a command, so that it is not sent again before the engine has had time to report.

        `gave_way_to` is the model for which the engine is put to sleep, if there is one.
        """
        found = self._engines[address]
        found.command_s, found.was_woken = now_s, not asleep
        if asleep:
            found.gave_way_to = gave_way_to

    def adopt_switches(self, switches: Mapping[str, str]) -> set[str]:
        """Take over what another gateway has recorded: the models for which engines, by address, gave way.

        Returns the engines whose switch is known now; an engine that is still awake is not among them.
        """
        for address, model in switches.items():
            found = self._engines.get(address)
            if found is not None and found.sleep is not SleepState.AWAKE and not found.gave_way_to:
                found.gave_way_to = model
        return {address for address in switches if (one := self._engines.get(address)) and one.gave_way_to}

    def ended_switches(self, addresses: Collection[str]) -> list[str]:
        """Return those of the engines that gave way and do no longer: they, or the model in their place, are awake."""
        return [one for one in addresses if one in self._engines and not self._engines[one].gave_way_to]

    def awaits_command(self, address: str, now_s: float, timeout_s: float, *, asleep: bool) -> bool:
        """Return whether the engine got the same command within the timeout, and has not followed it yet."""
        found = self._engines[address]
        is_recent = found.command_s is not None and now_s - found.command_s < timeout_s
        return is_recent and found.was_woken is not asleep

    def _note(self, found: EngineActivity, state: EngineState, load: Load, model: str, now_s: float) -> None:
        num_open = load.num_running + load.num_waiting + load.num_paused + state.num_inflight
        if num_open or load.requests_total != found.num_requests:
            found.num_requests, found.active_s = load.requests_total, now_s
        if load.sleep_problem and _has_failed(found, load.sleep, now_s):
            found.num_refusals += 1
            found.command_s, found.refused_until_s = None, now_s + _pause_s(found.num_refusals)
        if load.sleep is SleepState.AWAKE and found.sleep is not SleepState.AWAKE:
            found.awake_s = found.active_s = now_s
            found.gave_way_to = ""
            if found.command_s is not None and found.was_woken and found.sleep is not SleepState.FALLING_ASLEEP:
                self._on_awake(model, now_s - found.command_s)
        if load.sleep is not found.sleep:
            found.sleep = load.sleep
            if load.sleep in (SleepState.AWAKE, SleepState.ASLEEP):
                if found.command_s is not None:
                    found.num_refusals = 0
                found.command_s = None


def _pause_s(num_refusals: int) -> float:
    """Return how long an engine gets no command after this many failures in a row."""
    doublings = min(num_refusals - 1, MAX_DOUBLINGS)
    return min(REFUSED_S * 2.0**doublings, MAX_REFUSED_S)


def _has_failed(found: EngineActivity, sleep: SleepState, now_s: float) -> bool:
    """Return whether the problem that an engine reports is that of the last command.

    It is if the engine has returned to the state before the command, or has had time to report.
    """
    if found.command_s is None:
        return False
    before, under_way = SleepState.AWAKE, SleepState.FALLING_ASLEEP
    if found.was_woken:
        before, under_way = SleepState.ASLEEP, SleepState.WAKING
    has_returned = found.sleep is under_way and sleep is before
    return has_returned or now_s - found.command_s > STALE_S
