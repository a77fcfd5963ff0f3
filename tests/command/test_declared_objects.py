"""Objects that a declaration file holds, without a gateway: nesting, inheritance, and errors with their places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moiety_platform.cli.apply.current import Current, DeclaredEntry
from moiety_platform.cli.apply.document import read_document
from moiety_platform.cli.apply.kinds import apply_kinds
from moiety_platform.cli.apply.plan import PlanAction, PlanTerms, make_plan
from moiety_platform.cli.apply.spec import read_declared_objects
from moiety_platform.cli.errors import CommandError
from moiety_platform.resources.apply_kind import DeclaredObject
from moiety_platform.webhooks.terms import hash_routing_key

FILE = """
webhooks:
  - {name: ops, url: "https://ops.example.com", keySecret: ops-hook}
  - {name: pager, url: "https://p.example.com", format: pagerduty, routing_key: 0123456789abcdef,
     events: [slo]}
tenants:
  - name: acme
    models: [b, a]
    limits: {dollars_per_day: "1.50", requests_per_minute: 6, alert_at: [80, 50]}
    key_policy: {max_days: 30, allowed_models: [b, a], limits: {dollars_per_month: 2, tokens_per_day: 9}}
    projects:
      - name: web
        keys:
          - {name: ci, keySecret: acme-ci, limits: {tokens_per_day: 9}}
          - {name: own, models: [c]}
prices:
  - {model: m, service_class: gold, input: 1, output: 2.5}
routes:
  - {name: best, targets: [{model: m}, {model: n, weight: 0}], fallbacks: [o]}
guardrails:
  - {name: secrets, stage: input, detectors: [secrets]}
  - {name: policy, stage: output, tenant: acme, entry_point: policy, memory_mb: 64}
issuers:
  - {name: ci, url: "https://ci.example.com", audience: moiety, claim: org, models: [b, a],
     grants: [{claim_value: acme, project: acme/web}]}
users:
  - {email: Ada@example.com, role: developer, tenant: acme}
  - {email: op@example.com, role: operator, name: Op}
classes:
  - {name: gold, rank: 0}
  - {name: silver, rank: 1}
"""


def wanted_of(folder: Path, text: str) -> dict[tuple[str, str], DeclaredObject]:
    file = folder / "declared.yaml"
    file.write_text(text, encoding="utf-8")
    return {one.place: one for one in read_declared_objects(read_document(file))}


def test_entries_in_others_are_objects_of_their_own_and_know_their_parents(tmp_path: Path) -> None:
    found = wanted_of(tmp_path, FILE)
    assert found["project", "acme/web"].parent == ("tenant", "acme")
    assert found["key", "acme/web/ci"].parent == ("project", "acme/web")
    assert found["key", "acme/web/ci"].key_secret == "acme-ci"
    assert found["limit", "acme/web/ci: tokens_per_day"].parent == ("key", "acme/web/ci")
    assert found["limit", "acme: money_per_day"].fields == {"cap": 1_500_000_000, "alert_at": [50, 80]}
    assert found["limit", "acme: requests_per_minute"].fields == {"cap": 6}, "a rate has no alerts"
    assert found["price", "m in gold"].fields == {"input": "1", "output": "2.5"}
    targets = [{"model": "m", "weight": 1}, {"model": "n", "weight": 0}]
    assert found["route", "best"].fields == {"targets": targets, "fallbacks": ["o"]}
    assert found["guardrail", "secrets"].fields == {"stage": "input", "detectors": ["secrets"]}
    assert found["guardrail", "acme/policy"].parent == ("tenant", "acme")
    assert found["issuer", "ci"].fields == {
        "url": "https://ci.example.com",
        "audience": "moiety",
        "claim": "org",
        "models": ["a", "b"],
        "grants": [{"claim_value": "acme", "project": "acme/web", "models": None}],
    }
    assert found["key_policy", "acme"].parent == ("tenant", "acme")
    caps = {"money_per_month": 2_000_000_000, "tokens_per_day": 9}
    assert found["key_policy", "acme"].fields == {"max_days": 30, "allowed_models": ["a", "b"], "limits": caps}
    assert found["user", "acme/ada@example.com"].parent == ("tenant", "acme")
    assert found["user", "acme/ada@example.com"].fields == {"role": "developer"}
    assert found["user", "op@example.com"].fields == {"role": "operator", "name": "Op"}
    assert found["webhook", "ops"].fields == {"url": "https://ops.example.com"}


def test_a_tenant_without_a_key_policy_declares_none(tmp_path: Path) -> None:
    found = wanted_of(tmp_path, "tenants:\n  - name: acme\n  - {name: empty, key_policy: {}}\n")
    assert set(found) == {("tenant", "acme"), ("tenant", "empty")}


def test_a_routing_key_is_sent_when_a_webhook_is_created_and_compared_by_its_hash(tmp_path: Path) -> None:
    pager = wanted_of(tmp_path, FILE)["webhook", "pager"]
    shown: dict[str, Any] = {"url": "https://p.example.com", "format": "pagerduty", "events": ["slo"]}
    known = hash_routing_key(shown["url"], "0123456789abcdef")
    assert pager.fields == {**shown, "routing_key_hash": known}
    request = apply_kinds()["webhook"].create_request(pager, "")
    assert request.body == {**shown, "routing_key": "0123456789abcdef"}
    claims = {pager.place: DeclaredEntry("default", "whk_1")}
    terms = PlanTerms("default", shows_keys=True)
    row = {"id": "whk_1", **shown, "routing_key_hint": "cdef", "routing_key_hash": known}
    other = row | {"routing_key_hash": hash_routing_key(shown["url"], "1123456789abcdef")}  # with the same end
    (kept,) = make_plan([pager], Current({pager.place: row}, claims), terms)
    (replaced,) = make_plan([pager], Current({pager.place: other}, claims), terms)
    assert (kept.action, replaced.action) == (PlanAction.KEEP, PlanAction.REPLACE)


def test_a_key_has_the_models_of_its_tenant_unless_it_names_its_own(tmp_path: Path) -> None:
    found = wanted_of(tmp_path, FILE)
    assert found["key", "acme/web/ci"].fields == {"allowed_models": ["a", "b"]}
    assert found["key", "acme/web/own"].fields == {"allowed_models": ["c"]}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("webhooks:\n  - {name: a, url: u, keysecret: s}\n", ":2: webhooks[0].keysecret: is not known; did you mean"),
        (
            "tenants:\n  - name: a\n    limits: {tokens: 1}\n",
            ":3: tenants[0].limits.tokens: is not known",
        ),
        ("tenants:\n  - name: a\n    limits: {dollars_per_day: much}\n", ":3: tenants[0].limits.dollars_per_day: "),
        ("prices:\n  - {model: m, input: -1, output: 1}\n", ":2: prices[0].input: "),
        ("guardrails:\n  - {name: a, stage: input}\n", ":2: guardrails[0]: must have exactly one of detectors, url"),
        ("users:\n  - {email: a@b, role: developer}\n", ":2: users[0]: The role 'developer' is for one tenant"),
        (
            "tenants:\n  - name: a\n    key_policy: {limits: {alert_at: [80]}}\n",
            ":3: tenants[0].key_policy.limits.alert_at: is for quotas",
        ),
        ("webhooks:\n  - {name: a, url: u, format: teams}\n", ":2: webhooks[0].format: "),
        ("webhooks: x\n", ":1: webhooks: must be a list"),
    ],
)
def test_errors_of_declared_objects_are_reported_with_line_and_path(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(CommandError) as refused:
        wanted_of(tmp_path, text)
    assert complaint in str(refused.value)


def test_objects_are_created_after_what_they_depend_on_and_removed_before_it(tmp_path: Path) -> None:
    found = wanted_of(tmp_path, FILE)
    steps = make_plan(list(found.values()), Current({}, {}), PlanTerms("default", shows_keys=True))
    order = list(apply_kinds())
    assert [order.index(step.kind) for step in steps] == sorted(order.index(step.kind) for step in steps)
    assert [step.name for step in steps if step.kind == "class"] == ["silver", "gold"], "fallbacks come first"
    claims = {place: DeclaredEntry("default", None) for place in found}
    rows = {place: {"id": "i", "status": "active", **one.fields} for place, one in found.items()}
    gone = make_plan([], Current(rows, claims), PlanTerms("default", prune=True))
    assert [order.index(step.kind) for step in gone] == sorted((order.index(one.kind) for one in gone), reverse=True)
    actions = {step.kind: step.action for step in gone}
    assert actions["tenant"] is PlanAction.SUSPEND
    assert actions["project"] is PlanAction.RELEASE
    assert {actions[kind] for kind in ("limit", "key", "webhook", "price", "route", "class")} == {PlanAction.DELETE}
