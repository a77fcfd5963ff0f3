"""Custom resources as declarations: each is applied or has a problem, and no key is applied without its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.cli.apply.plan import PlanAction, PlanStep
from moiety_platform.cli.controller.custom_objects import EPOCH, CustomKind, CustomObject, new_condition
from moiety_platform.cli.controller.declarations import declarations_of
from moiety_platform.cli.controller.withholding import keys_without_limits, withhold_steps

TENANT, KEY, LIMIT = CustomKind.TENANT, CustomKind.API_KEY, CustomKind.LIMIT


def custom(kind: CustomKind, name: str, /, **spec: Any) -> CustomObject:
    return CustomObject(kind, name, 1, spec)


def aged(one: CustomObject, seconds: int) -> CustomObject:
    return replace(one, created_at=EPOCH + timedelta(seconds=seconds))


def test_objects_become_the_entries_of_a_file_and_each_part_knows_its_object() -> None:
    made = declarations_of(
        [
            custom(LIMIT, "per-day", tenant="acme", limits={"tokens_per_day": 9, "dollars_per_month": "5"}),
            custom(LIMIT, "of-web", tenant="acme", project="web", limits={"requests_per_minute": 6}),
            custom(LIMIT, "of-ci", tenant="acme", key="ci", limits={"concurrent_requests": 2}),
            custom(KEY, "ci", tenant="acme", project="web", keySecret="acme-ci", models=["m"]),
            custom(KEY, "other", tenant="acme", keySecret="acme-other"),
            custom(TENANT, "acme", weight=2, models=["m"]),
        ]
    )
    assert made.problems == {}
    assert {f"{kind} {name}": owner for (kind, name), owner in made.owners.items()} == {
        "tenant acme": (TENANT, "acme"),
        "project acme/web": (KEY, "ci"),
        "project acme/default": (KEY, "other"),
        "key acme/web/ci": (KEY, "ci"),
        "key acme/default/other": (KEY, "other"),
        "limit acme: tokens_per_day": (LIMIT, "per-day"),
        "limit acme: money_per_month": (LIMIT, "per-day"),
        "limit acme/web: requests_per_minute": (LIMIT, "of-web"),
        "limit acme/web/ci: concurrent_requests": (LIMIT, "of-ci"),
    }


@pytest.mark.parametrize(
    ("objects", "ref", "words"),
    [
        ([custom(KEY, "k", tenant="none", keySecret="s")], (KEY, "k"), "no Tenant 'none'"),
        (
            [custom(TENANT, "a"), custom(LIMIT, "l", tenant="a", key="k", limits={"tokens_per_day": 1})],
            (LIMIT, "l"),
            "no ApiKey 'k'",
        ),
        ([custom(TENANT, "a", name="x"), custom(TENANT, "b", name="x")], (TENANT, "b"), "has the same name 'x'"),
        ([custom(TENANT, "a", wieght=2)], (TENANT, "a"), "wieght"),
        (
            [
                custom(TENANT, "a"),
                custom(LIMIT, "l", tenant="a", limits={"tokens_per_day": 1}),
                custom(LIMIT, "m", tenant="a", limits={"tokens_per_day": 2}),
            ],
            (LIMIT, "m"),
            "'l' gives tokens_per_day too, and its 1 is applied",
        ),
    ],
)
def test_an_object_that_cannot_be_applied_is_told_why_and_others_are_applied(
    objects: list[CustomObject], ref: Any, words: str
) -> None:
    made = declarations_of([*objects, custom(TENANT, "fine")])
    assert words in made.problems[ref]
    assert ("tenant", "fine") in made.owners


def test_a_condition_is_written_only_when_it_changes() -> None:
    one = custom(TENANT, "a")
    first = new_condition(one, "", "2026-01-01T00:00:00Z")
    assert first is not None and (first["status"], first["reason"]) == ("True", "Applied")
    known = CustomObject(TENANT, "a", 1, {}, (first,))
    assert new_condition(known, "", "2026-01-02T00:00:00Z") is None
    newer = new_condition(CustomObject(TENANT, "a", 2, {}, (first,)), "", "2026-01-02T00:00:00Z")
    assert newer is not None and newer["lastTransitionTime"] == "2026-01-01T00:00:00Z"
    failed = new_condition(known, "no", "2026-01-02T00:00:00Z")
    assert failed is not None
    assert (failed["status"], failed["message"], failed["lastTransitionTime"]) == (
        "False",
        "no",
        "2026-01-02T00:00:00Z",
    )


def test_the_older_of_two_tenants_of_one_name_is_applied_and_no_object_of_the_other() -> None:
    made = declarations_of(
        [
            aged(custom(TENANT, "acme"), 1),
            aged(custom(TENANT, "aaa", name="acme", weight=9), 2),
            custom(KEY, "web", tenant="aaa", keySecret="s"),
            custom(LIMIT, "cap", tenant="aaa", limits={"tokens_per_day": 5}),
        ]
    )
    assert made.owners == {("tenant", "acme"): (TENANT, "acme")}
    assert set(made.problems) == {(TENANT, "aaa"), (KEY, "web"), (LIMIT, "cap")}


@pytest.mark.parametrize("lower_is_older", [True, False])
def test_of_two_caps_of_one_kind_the_lower_is_applied_and_the_other_fields_of_both(lower_is_older: bool) -> None:
    made = declarations_of(
        [
            custom(TENANT, "a"),
            aged(custom(LIMIT, "low", tenant="a", limits={"dollars_per_month": "9.5", "tokens_per_day": 7}), 2),
            aged(
                custom(LIMIT, "high", tenant="a", limits={"dollars_per_month": 10, "requests_per_minute": 3}),
                1 if not lower_is_older else 3,
            ),
        ]
    )
    assert {one.name: one.fields["cap"] for one in made.declared if one.kind == "limit"} == {
        "a: money_per_month": 9_500_000_000,
        "a: tokens_per_day": 7,
        "a: requests_per_minute": 3,
    }
    assert set(made.problems) == {(LIMIT, "high")}
    assert "dollars_per_month" in made.problems[LIMIT, "high"]
    assert keys_without_limits(made, ()) == {}


@pytest.mark.parametrize(
    ("limit", "held"),
    [
        ({"limits": {"tokens_per_dya": 1}}, {"one", "two", "three"}),
        ({"project": "p", "limits": {"tokens_per_day": "x"}}, {"one", "two"}),
        ({"key": "one", "limits": {"alert_at": [50]}}, {"one"}),
        ({"key": "one", "project": "p", "limits": {"tokens_per_day": 1}}, {"one"}),
    ],
)
def test_keys_wait_for_the_limit_that_is_for_them(limit: dict[str, Any], held: set[str]) -> None:
    made = declarations_of(
        [
            custom(TENANT, "a"),
            custom(KEY, "one", tenant="a", project="p", keySecret="s"),
            custom(KEY, "two", tenant="a", project="p", keySecret="s"),
            custom(KEY, "three", tenant="a", keySecret="s"),
            custom(LIMIT, "wrong", tenant="a", **limit),
        ]
    )
    assert set(made.problems) == {(LIMIT, "wrong")}
    assert {name for _, name in keys_without_limits(made, ())} == held
    new = [PlanStep(PlanAction.CREATE, *place) for place in made.owners if place[0] == "key"]
    refused = [step for step in withhold_steps(made, new, {}) if step.action is PlanAction.REFUSE]
    assert {step.name.rpartition("/")[2] for step in refused} == held
    kept = [replace(step, action=PlanAction.KEEP) for step in new]
    assert withhold_steps(made, kept, {}) == kept  # an existing key stays as it is


PLACES = [
    ("tenant", "acme", PlanAction.SUSPEND),
    ("project", "acme/old", PlanAction.RELEASE),
    ("key", "acme/default/gone", PlanAction.DELETE),
    ("key", "acme/default/web", PlanAction.DELETE),
    ("limit", "acme: tokens_per_day", PlanAction.DELETE),
    ("limit", "acme/default/web: tokens_per_day", PlanAction.DELETE),
    ("tenant", "acme2", PlanAction.SUSPEND),
    ("key", "acme2/default/web", PlanAction.DELETE),
    ("limit", "acme2: tokens_per_day", PlanAction.DELETE),
]


@pytest.mark.parametrize(
    ("objects", "kept"),
    [
        ([custom(TENANT, "acme")], set()),
        ([custom(TENANT, "acme", wieght=1)], {"acme", "acme/old", "acme: tokens", "acme/default/web: tokens"}),
        (
            [custom(TENANT, "acme", wieght=1), custom(KEY, "web", tenant="acme", keySecret="s")],
            {"acme", "acme/old", "acme/default/web", "acme: tokens", "acme/default/web: tokens"},
        ),
        ([custom(KEY, "web", tenant="acme", keySecret="s")], set()),  # its Tenant is deleted
        ([custom(TENANT, "other", wieght=1), custom(KEY, "web", tenant="other", keySecret="s")], set()),
        (
            [custom(TENANT, "x", name="acme"), custom(LIMIT, "l", tenant="x", limits={})],
            {"acme", "acme/old", "acme: tokens", "acme/default/web: tokens"},
        ),
    ],
)
def test_only_removals_of_a_tenant_with_a_problem_wait_and_no_key_of_a_deleted_object(
    objects: Sequence[CustomObject], kept: set[str]
) -> None:
    steps = [PlanStep(action, kind, name) for kind, name, action in PLACES]
    found = withhold_steps(declarations_of(objects), steps, {})
    left = {step.name.replace("_per_day", "") for step in found if step.action is PlanAction.LEFT}
    assert left == kept
    assert all(step.why for step in found if step.action is PlanAction.LEFT)


def test_a_refusal_of_the_gateway_delays_removals_of_its_tenant_and_new_keys_of_its_limit() -> None:
    made = declarations_of(
        [
            custom(TENANT, "a"),
            custom(KEY, "k", tenant="a", keySecret="s"),
            custom(LIMIT, "l", tenant="a", limits={"tokens_per_day": 2**70}),
        ]
    )
    steps = [
        PlanStep(PlanAction.CREATE, "key", "a/default/k"),
        PlanStep(PlanAction.DELETE, "limit", "a: tokens_per_month"),
        PlanStep(PlanAction.DELETE, "key", "a/default/gone"),
    ]
    assert withhold_steps(made, steps, {}) == steps
    found = withhold_steps(made, steps, {("limit", "a: tokens_per_day"): "too large"})
    assert [step.action for step in found] == [PlanAction.REFUSE, PlanAction.LEFT, PlanAction.DELETE]


NAMES = st.sampled_from("abc")
CAPS = st.dictionaries(
    st.sampled_from(["tokens_per_day", "dollars_per_month", "alert_at", "typing_error"]),
    st.one_of(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["2", "1.5", "x", None, True, [50]])),
    max_size=2,
)


def specs(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    needed = {name: fields.pop(name) for name in ("tenant", "keySecret", "limits") if name in fields}
    return st.fixed_dictionaries(needed, optional=fields)


def object_sets() -> st.SearchStrategy[list[CustomObject]]:
    weights, projects = st.sampled_from([1, 2.5, "x"]), st.sampled_from(["p", "q", 5, None])
    of_kinds = [
        (TENANT, specs(name=st.one_of(NAMES, st.just(5)), weight=weights, wieght=weights)),
        (KEY, specs(tenant=NAMES, keySecret=st.just("s"), project=projects, models=st.sampled_from([["m"], "m"]))),
        (LIMIT, specs(tenant=NAMES, limits=st.one_of(CAPS, st.just(5)), project=projects, key=NAMES)),
    ]
    return st.lists(
        st.one_of(
            st.builds(
                CustomObject, st.just(kind), NAMES, st.just(1), spec, st.just(()),
                st.integers(0, 2).map(lambda age: EPOCH + timedelta(seconds=age)),
            )
            for kind, spec in of_kinds
        ),
        max_size=12,
        unique_by=lambda one: one.ref,
    )  # fmt: skip


@given(object_sets())
def test_each_object_has_a_declared_place_or_a_problem(objects: list[CustomObject]) -> None:
    made = declarations_of(objects)
    refs = {one.ref for one in objects}
    assert set(made.owners.values()) | set(made.problems) == refs
    assert set(made.owners) == {one.place for one in made.declared}


DAILY = st.fixed_dictionaries({"tokens_per_day": st.integers(0, 9)})
LIMITS = st.lists(
    st.builds(
        CustomObject, st.just(LIMIT), st.sampled_from("abcd"), st.just(1),
        specs(tenant=st.just("t"), limits=DAILY | DAILY | CAPS,
              project=st.just("p"), key=st.just("one") | st.just("two")),
        st.just(()), st.integers(0, 2).map(lambda age: EPOCH + timedelta(seconds=age)),
    ),
    min_size=2, max_size=4, unique_by=lambda one: one.ref,
)  # fmt: skip


@given(LIMITS)
def test_each_cap_is_applied_or_a_lower_one_or_no_key_is_created_that_it_limits(limits: list[CustomObject]) -> None:
    keys = [custom(KEY, "one", tenant="t", project="p", keySecret="s"), custom(KEY, "two", tenant="t", keySecret="s")]
    made = declarations_of([custom(TENANT, "t"), *keys, *limits])
    held = keys_without_limits(made, ())
    caps = {one.name: one.fields["cap"] for one in made.declared if one.kind == "limit"}
    for project, key in (("p", "one"), ("default", "two")):
        assert ("key", f"t/{project}/{key}") in made.owners
        for spec in (one.spec for one in limits if (KEY, key) not in held):
            if spec.get("key", key) != key or ("key" not in spec and spec.get("project", project) != project):
                continue
            scope = f"t/{project}/{key}" if "key" in spec else f"t/{project}" if "project" in spec else "t"
            for kind, value in spec["limits"].items():
                if kind != "alert_at" and value is not None:
                    unit = 1_000_000_000 if kind.startswith("dollars") else 1
                    assert caps[f"{scope}: {kind.replace('dollars', 'money')}"] <= float(value) * unit
