"""Which engines are woken and which are put to sleep, without engines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.wake_on_request.plan import (
    ModelDemand,
    SleepView,
    WakePlan,
    WakeTerms,
    expected_wait_s,
    plan_sleep,
)
from moiety_wire.engine_load import SleepState
from moiety_wire.roles import EngineRole

AWAKE, ASLEEP, FALLING, WAKING = (
    SleepState.AWAKE,
    SleepState.ASLEEP,
    SleepState.FALLING_ASLEEP,
    SleepState.WAKING,
)
TERMS = WakeTerms(max_awake=1, min_awake_s=10, wake_s={"a": 2.0, "b": 3.0})


def engine(address: str, sleep: SleepState, group: str = "gpu", *, idle_s: float = 0, awake_s: float = 99) -> SleepView:
    """Return an engine of the model that its address begins with."""
    return SleepView(address, address[0], sleep, group, idle_s=idle_s, awake_s=awake_s)


def demand(model: str, slack_s: float = 5.0, num_waiting: int = 1) -> ModelDemand:
    return ModelDemand(model, num_waiting, slack_s)


def test_a_request_wakes_one_engine_of_its_model_and_a_waking_one_suffices() -> None:
    two = [engine("a1", ASLEEP, ""), engine("a2", ASLEEP, "")]
    assert plan_sleep(two, [demand("a", num_waiting=50)], TERMS) == WakePlan(wake=("a1",))
    assert plan_sleep([engine("a1", WAKING, ""), two[1]], [demand("a")], TERMS) == WakePlan()
    assert plan_sleep(two, [demand("b")], TERMS) == WakePlan()


def test_each_role_of_a_model_is_woken() -> None:
    roles = [EngineRole.PREFILL, EngineRole.DECODE]
    both = [SleepView(f"a{role}", "a", ASLEEP, role=role) for role in roles]
    assert set(plan_sleep(both, [demand("a")], TERMS).wake) == {one.address for one in both}


def test_an_idle_engine_gives_way_at_once_and_a_busy_one_after_its_minimum_awake_time() -> None:
    asleep, wanted = engine("a1", ASLEEP), [demand("a")]
    idle, busy = engine("b1", AWAKE, idle_s=2, awake_s=3), engine("b1", AWAKE, awake_s=9)
    assert plan_sleep([asleep, idle], wanted, TERMS) == WakePlan(sleep=("b1",), gave_way={"b1": "a"})
    assert plan_sleep([asleep, busy], wanted, TERMS) == WakePlan()
    turn_over = msgspec.structs.replace(busy, awake_s=10)
    assert plan_sleep([asleep, turn_over], wanted, TERMS) == WakePlan(sleep=("b1",), gave_way={"b1": "a"})
    just_woken = engine("b1", AWAKE, idle_s=0.1, awake_s=0.1)
    assert plan_sleep([asleep, just_woken], wanted, TERMS) == WakePlan(), "requests that woke it are on their way"
    assert plan_sleep([asleep, engine("b1", FALLING)], wanted, TERMS) == WakePlan(), "its memory is not free yet"
    assert plan_sleep([asleep, engine("b1", ASLEEP)], wanted, TERMS) == WakePlan(wake=("a1",))


def test_the_idle_engine_that_is_idle_longest_gives_way_before_a_busy_one() -> None:
    terms = msgspec.structs.replace(TERMS, max_awake=3)
    others = [engine("b1", AWAKE, idle_s=5), engine("c1", AWAKE, idle_s=50), engine("d1", AWAKE, awake_s=999)]
    assert plan_sleep([engine("a1", ASLEEP), *others], [demand("a")], terms).sleep == ("c1",)


def test_an_engine_that_gave_way_in_vain_is_woken_or_stays_awake() -> None:
    a = engine("a1", ASLEEP)
    for state in (ASLEEP, FALLING):
        b = msgspec.structs.replace(engine("b1", state), gave_way_to="a")
        assert plan_sleep([a, b], [], TERMS) == WakePlan(restore=("b1",)), "the requests for a have left"
        assert plan_sleep([a, b], [demand("b")], TERMS).restore == (("b1",) if state is FALLING else ())
        assert plan_sleep([a, b], [demand("a")], TERMS).restore == ()
        for taken in (AWAKE, WAKING):
            others = [engine("a1", taken), b] if state is ASLEEP else [a, engine("c1", taken), b]
            assert plan_sleep(others, [], TERMS).restore == (), "its place is taken, or a's switch has succeeded"
        unable = msgspec.structs.replace(a, can_sleep=False)
        assert plan_sleep([unable, b], [demand("a")], TERMS).restore == ("b1",), "a could not wake"
        assert plan_sleep([b], [demand("a")], TERMS).restore == ("b1",), "a is gone"
        assert plan_sleep([a, engine("b1", state)], [], TERMS) == WakePlan(), "an administrator put it to sleep"


def test_the_demand_with_the_least_slack_after_its_wake_time_is_first() -> None:
    asleep = [engine("a1", ASLEEP), engine("b1", ASLEEP)]
    assert plan_sleep(asleep, [demand("a", 5.0), demand("b", 5.5)], TERMS).wake == ("b1",), "b takes a second longer"
    assert plan_sleep(asleep, [demand("a", 5.0), demand("b", 6.5)], TERMS).wake == ("a1",)
    assert plan_sleep(asleep, [demand("a", 5.0), demand("b", 6.0, 9)], TERMS).wake == ("b1",), "more wait for it"


def test_idle_engines_sleep_after_the_time_and_those_beyond_the_limit_of_their_group_at_once() -> None:
    terms = msgspec.structs.replace(TERMS, sleep_after_s=60)
    alone = [engine("a1", AWAKE, "", idle_s=61), engine("b1", AWAKE, "", idle_s=59), engine("c1", AWAKE, "")]
    assert plan_sleep(alone, [], terms) == WakePlan(sleep=("a1",))
    assert plan_sleep(alone, [], TERMS) == WakePlan()
    started = [engine(name, AWAKE, idle_s=2, awake_s=2) for name in ("a1", "b1", "c1")]
    assert plan_sleep(started, [], TERMS) == WakePlan(sleep=("a1", "b1"))
    encoder = msgspec.structs.replace(alone[0], can_sleep=False)
    assert plan_sleep([encoder], [], terms) == WakePlan()


def test_the_expected_wait_counts_awake_times_turns_and_measured_wake_times() -> None:
    asleep = engine("a1", ASLEEP)
    assert expected_wait_s("a", [asleep], [], TERMS) == 2
    assert expected_wait_s("a", [engine("a1", ASLEEP, ""), engine("b1", AWAKE)], [], TERMS) == 2
    busy = engine("b1", AWAKE, awake_s=4)
    assert expected_wait_s("a", [asleep, busy], [], TERMS) == 6 + 2
    assert expected_wait_s("a", [asleep, engine("b1", AWAKE, idle_s=5)], [], TERMS) == 2
    ahead = [demand("c", 0.0), demand("a", 100.0)]
    assert expected_wait_s("a", [asleep, busy, engine("c1", ASLEEP)], ahead, TERMS) == 6 + 10 + 2


states = st.sampled_from(list(SleepState))
times = st.sampled_from([0.0, 0.5, 2.0, 30.0])
fleets = st.lists(
    st.builds(
        lambda model, number, sleep, group, idle_s, awake_s, gave_way_to: SleepView(
            f"{model}{number}", model, sleep, group, idle_s=idle_s, awake_s=awake_s, gave_way_to=gave_way_to
        ),
        st.sampled_from("abc"),
        st.integers(0, 3),
        states,
        st.sampled_from(["", "gpu0", "gpu1"]),
        times,
        times,
        st.sampled_from(["", "a", "b"]),
    ),
    max_size=8,
    unique_by=lambda one: one.address,
)
needs = st.lists(
    st.builds(ModelDemand, st.sampled_from("abcd"), st.integers(0, 9), st.floats(-10, 60)),
    max_size=4,
    unique_by=lambda one: one.model,
)
limits = st.builds(WakeTerms, st.integers(1, 3), times, times)


@given(fleets, needs, limits)
def test_no_plan_wakes_an_engine_into_a_full_group_or_ends_an_awake_time_early(
    fleet: list[SleepView], demands: list[ModelDemand], terms: WakeTerms
) -> None:
    plan = plan_sleep(fleet, demands, terms)
    of = {one.address: one for one in fleet}
    commanded = [*plan.wake, *plan.sleep, *plan.restore]
    assert len({*commanded}) == len(commanded)
    assert all(of[address].gave_way_to and of[address].sleep in (ASLEEP, FALLING) for address in plan.restore)
    assert plan.gave_way.keys() <= {*plan.sleep}
    assert all(of[address].sleep is ASLEEP for address in plan.wake)
    assert all(of[address].sleep is AWAKE for address in plan.sleep)
    before = Counter(one.group for one in fleet if one.group and one.sleep is not ASLEEP)
    restored = [address for address in plan.restore if of[address].sleep is ASLEEP]
    woken = Counter(of[address].group for address in (*plan.wake, *restored) if of[address].group)
    assert all(before[group] + count <= terms.max_awake for group, count in woken.items())
    wanted = {one.model for one in demands}
    assert {of[address].model for address in plan.wake} <= wanted
    for address in plan.sleep:
        one = of[address]
        assert not one.is_busy or one.awake_s >= terms.min_awake_s


@dataclass
class Group:
    """Engines of one group that follow plans: falling asleep takes one step, waking two."""

    models: str
    max_awake: int
    clock_s: float = 0.0
    sleep: dict[str, SleepState] = field(default_factory=dict)
    since_s: dict[str, float] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)

    def step(self, terms: WakeTerms, waited_s: Counter[str], slacks_s: dict[str, float]) -> None:
        """Follow a plan for a second. The slack of a model is that of its newest request: clients give up and retry."""
        views = [
            SleepView(model, model, self.sleep[model], "gpu", awake_s=self.clock_s - self.since_s[model])
            for model in self.models
        ]
        needed = [
            ModelDemand(model, 1, slacks_s[model], waited_s[model])
            for model in self.models
            if self.sleep[model] is not AWAKE
        ]
        plan = plan_sleep(views, needed, terms)
        for model in self.models:
            after = {FALLING: ASLEEP, WAKING: AWAKE}.get(self.sleep[model])
            if after is not None:
                self.sleep[model], self.since_s[model] = after, self.clock_s
            elif self.sleep[model] is AWAKE:
                self.served[model] += 1
        for model in plan.wake:
            self.sleep[model] = WAKING
        for model in plan.sleep:
            self.sleep[model] = FALLING
        assert sum(state is not ASLEEP for state in self.sleep.values()) <= self.max_awake
        self.clock_s += 1


@given(
    st.lists(st.sampled_from([0.5, 1.0, 10.0, 600.0]), min_size=2, max_size=5), st.integers(1, 2), st.integers(0, 12)
)
def test_busy_models_of_a_group_take_turns_and_none_starves(
    slacks_s: list[float], max_awake: int, min_awake_s: int
) -> None:
    models = "abcde"[: len(slacks_s)]
    group = Group(models, max_awake)
    for model in models:
        group.sleep[model], group.since_s[model] = ASLEEP, 0.0
    terms = WakeTerms(max_awake, min_awake_s)
    waited_s, longest_s = Counter[str](), 0
    for _ in range(60 * (min_awake_s + 4)):
        for model in models:
            waited_s[model] = 0 if group.sleep[model] is AWAKE else waited_s[model] + 1
        longest_s = max(longest_s, *waited_s.values())
        group.step(terms, waited_s, dict(zip(models, slacks_s, strict=True)))
    assert len(group.served) == len(models)
    assert longest_s <= 3 * len(models) * (min_awake_s + 4), "a turn until it is overdue, then one of each other model"


def test_a_model_without_a_ttft_slo_gets_the_place_that_an_urgent_one_would_take_again() -> None:
    asleep = [engine("a1", ASLEEP), engine("b1", ASLEEP)]
    urgent, patient = ModelDemand("a", 3, 0.5, 1.0), ModelDemand("b", 1, 590.0, 21.0)
    assert plan_sleep(asleep, [urgent, patient], TERMS).wake == ("b1",), "b has waited longer than a turn of both"
    patient = msgspec.structs.replace(patient, waited_s=20.0)
    assert plan_sleep(asleep, [urgent, patient], TERMS).wake == ("a1",)
    overdue = ModelDemand("a", 3, 0.5, 30.0)
    assert plan_sleep(asleep, [overdue, msgspec.structs.replace(patient, waited_s=31.0)], TERMS).wake == ("b1",)
