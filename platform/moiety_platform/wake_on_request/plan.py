"""Plan of the engines to wake and to put to sleep: a pure function of the engines and of the waiting requests.

Engines of a device group share the memory of a device, so that only some of them are awake at the same time. When a
model is needed whose engines are asleep and its group is full, another engine gives way: one without requests first,
the one that is idle longest; then the one that has been awake longest, and only after its minimum awake time, so that
two busy models take turns instead of displacing each other after each request. A demand that has waited longer than
one turn of all models of its group is served before the urgent ones, so that no model starves. An engine that gave way
in vain, because the requests have left or the other engine cannot wake, is woken again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from moiety_wire.engine_load import SleepState
from moiety_wire.roles import EngineRole

MIN_IDLE_AWAKE_S = 1.0  # of a woken engine without requests, so that the requests that woke it can reach it


class SleepView(msgspec.Struct, frozen=True):
    """An engine as the plan needs it. `idle_s` is the time since it last had a request, 0 while it has one."""

    address: str
    model: str
    sleep: SleepState
    group: str = ""  # device group; "": it shares its device with no other engine
    role: EngineRole = EngineRole.BOTH
    idle_s: float = 0.0
    awake_s: float = 0.0  # since it was woken or started
    can_sleep: bool = True  # False for an engine without sleep mode, or that could not follow a command lately
    gave_way_to: str = ""  # model for which it sleeps, or is about to, and that has not been awake since

    @property
    def is_busy(self) -> bool:
        return self.idle_s <= 0


class ModelDemand(msgspec.Struct, frozen=True):
    """Requests that wait for an engine of a model.

    `slack_s` is the time until the first one misses its SLO, and `waited_s` the time since the model is needed and has
    no awake engine.
    """

    model: str
    num_waiting: int
    slack_s: float
    waited_s: float = 0.0


class WakeTerms(msgspec.Struct, frozen=True):
    """Limits of the plan, and the measured times of waking an engine by model."""

    max_awake: int = 1  # engines of a device group
    min_awake_s: float = 0.0  # of a busy engine of a device group
    sleep_after_s: float = 0.0  # 0: idle engines stay awake
    wake_s: Mapping[str, float] = {}


class WakePlan(msgspec.Struct, frozen=True):
    """Addresses of engines to wake, and of engines to put to sleep.

    `gave_way` has the models for which engines of `sleep` give way. `restore` are engines that gave way in vain, which
    are woken, or kept awake if they have not fallen asleep yet.
    """

    wake: tuple[str, ...] = ()
    sleep: tuple[str, ...] = ()
    gave_way: Mapping[str, str] = {}
    restore: tuple[str, ...] = ()


def plan_sleep(engines: Sequence[SleepView], demands: Sequence[ModelDemand], terms: WakeTerms) -> WakePlan:
    """Return the engines to wake and to put to sleep now.

    Demands come in the order of `in_order`. A demand whose model has an engine that is awake or waking changes nothing.
    """
    wake: list[str] = []
    sleep: list[str] = []
    gave_way: dict[str, str] = {}
    used = Counter(one.group for one in engines if one.group and one.sleep is not SleepState.ASLEEP)
    freed = Counter(one.group for one in engines if one.group and one.sleep is SleepState.FALLING_ASLEEP)
    wanted = {demand.model for demand in demands}
    for demand in in_order(engines, demands, terms):
        for role in sorted({one.role for one in engines if one.model == demand.model}):
            ours = [one for one in engines if one.model == demand.model and one.role == role]
            if any(one.sleep in (SleepState.AWAKE, SleepState.WAKING) and one.address not in sleep for one in ours):
                continue
            asleep = [one for one in ours if one.sleep is SleepState.ASLEEP and one.can_sleep]
            free = [one for one in asleep if not one.group or used[one.group] < terms.max_awake]
            if free:
                chosen = min(free, key=lambda one: (bool(one.group), one.address))
                wake.append(chosen.address)
                if chosen.group:
                    used[chosen.group] += 1
                continue
            groups = sorted({one.group for one in asleep})
            awaited = next((group for group in groups if freed[group] > 0), None)
            if awaited is not None:
                freed[awaited] -= 1  # an engine of this group is falling asleep
                continue
            victim = _victim([one for one in engines if one.group in groups], wanted, sleep, terms)
            if victim is not None:
                sleep.append(victim.address)
                gave_way[victim.address] = demand.model
    sleep += _idle(engines, wanted, sleep, terms)
    restore = _in_vain(engines, wake, used, freed, terms)
    return WakePlan(tuple(wake), tuple(sleep), gave_way, tuple(restore))


def in_order(engines: Sequence[SleepView], demands: Sequence[ModelDemand], terms: WakeTerms) -> list[ModelDemand]:
    """Return the demands in the order in which they are served.

    Demands that have waited longer than a turn of their device group come first, the longest wait before the others.
    Then come those with the least slack after the model's wake time, then those with the most waiting requests.
    """
    turns_s = {demand.model: _turn_s(demand.model, engines, terms) for demand in demands}

    def urgency(demand: ModelDemand) -> tuple[float, float, int, str]:
        waited_s = demand.waited_s if demand.waited_s > turns_s[demand.model] else 0.0
        slack_s = demand.slack_s - terms.wake_s.get(demand.model, 0.0)
        return -waited_s, slack_s, -demand.num_waiting, demand.model

    return sorted(demands, key=urgency)


def _turn_s(model: str, engines: Sequence[SleepView], terms: WakeTerms) -> float:
    """Return the minimum awake time of all models that share a group with the model; infinite without a group."""
    groups = {one.group for one in engines if one.model == model and one.group}
    sharing = {one.model for one in engines if one.group in groups}
    return terms.min_awake_s * len(sharing) if sharing else math.inf


def expected_wait_s(
    model: str, engines: Sequence[SleepView], demands: Sequence[ModelDemand], terms: WakeTerms
) -> float:
    """Return the predicted time until an engine of the model is awake, in seconds; a time never measured counts as 0.

    In a full device group this is the wake time after the rest of the minimum awake time of the engine that gives way,
    and after the turns of the models that are ahead.
    """
    ours = [one for one in engines if one.model == model]
    wake_s = terms.wake_s.get(model, 0.0)
    if not ours or any(one.sleep in (SleepState.AWAKE, SleepState.WAKING) for one in ours):
        return wake_s
    groups = {one.group for one in ours if one.sleep is SleepState.ASLEEP}
    members = {group: [one for one in engines if one.group == group] for group in groups if group}
    used = {group: sum(one.sleep is not SleepState.ASLEEP for one in found) for group, found in members.items()}
    if "" in groups or not groups or any(num_used < terms.max_awake for num_used in used.values()):
        return wake_s
    rests = [_rest_s(one, terms) for found in members.values() for one in found if one.sleep is not SleepState.ASLEEP]
    sharing = {one.model for found in members.values() for one in found}
    turns_s = 0.0
    for demand in in_order(engines, demands, terms):
        if demand.model == model:
            break
        if demand.model in sharing:
            turns_s += terms.min_awake_s + terms.wake_s.get(demand.model, 0.0)
    return min(rests) + turns_s / terms.max_awake + wake_s


def _rest_s(engine: SleepView, terms: WakeTerms) -> float:
    """Return how long an engine still stays awake before it may give way."""
    min_awake_s = terms.min_awake_s if engine.is_busy else min(MIN_IDLE_AWAKE_S, terms.min_awake_s)
    return max(0.0, min_awake_s - engine.awake_s)


def _victim(engines: Sequence[SleepView], wanted: set[str], sleep: Sequence[str], terms: WakeTerms) -> SleepView | None:
    """Return the engine of a full group that gives way, or None if none may yet."""
    able = [
        one
        for one in engines
        if one.sleep is SleepState.AWAKE
        and one.can_sleep
        and one.address not in sleep
        and not _rest_s(one, terms)
        and not (one.model in wanted and one.awake_s < terms.min_awake_s)
    ]
    return min(able, key=lambda one: (one.is_busy, -one.idle_s, -one.awake_s, one.address), default=None)


def _in_vain(
    engines: Sequence[SleepView], wake: Sequence[str], used: Counter[str], freed: Counter[str], terms: WakeTerms
) -> list[str]:
    """Return the engines that gave way for models that do not take their place.

    `used` counts the places of each group after the wakes, and `freed` those of engines that fall asleep and that no
    demand awaits. The engine that was awake last comes first.
    """
    chosen = []
    for one in sorted(engines, key=lambda one: (one.idle_s, one.address)):
        if not one.gave_way_to or not one.can_sleep or one.address in wake:
            continue
        if one.sleep is SleepState.FALLING_ASLEEP and freed[one.group] > 0 and used[one.group] <= terms.max_awake:
            freed[one.group] -= 1
            chosen.append(one.address)
        elif one.sleep is SleepState.ASLEEP and used[one.group] < terms.max_awake:
            used[one.group] += 1
            chosen.append(one.address)
    return chosen


def _idle(engines: Sequence[SleepView], wanted: set[str], sleep: Sequence[str], terms: WakeTerms) -> list[str]:
    """Return the idle engines to put to sleep: after `sleep_after_s`, and those beyond the limit of their group."""
    idle = [
        one
        for one in engines
        if one.sleep is SleepState.AWAKE
        and one.can_sleep
        and not one.is_busy
        and one.model not in wanted
        and one.address not in sleep
    ]
    chosen = [one.address for one in idle if terms.sleep_after_s and one.idle_s >= terms.sleep_after_s]
    leaving = {*sleep, *chosen}
    awake = Counter(
        one.group for one in engines if one.group and one.sleep is SleepState.AWAKE and one.address not in leaving
    )
    for one in sorted(idle, key=lambda one: (-one.idle_s, one.address)):
        if one.group and one.address not in leaving and awake[one.group] > terms.max_awake and not _rest_s(one, terms):
            awake[one.group] -= 1
            chosen.append(one.address)
    return chosen
