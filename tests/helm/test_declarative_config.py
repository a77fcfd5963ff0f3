"""What values declare is a file that `moiety apply` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import yaml

from moiety_platform.auth.users.declared import UserForm
from moiety_platform.classes.declared import ClassForm
from moiety_platform.cli.apply.document import read_document
from moiety_platform.cli.apply.spec import read_declared_objects
from moiety_platform.guardrails.declared import GuardrailForm
from moiety_platform.jwt_issuers.declared import JwtIssuerForm
from moiety_platform.model_routes.declared import RouteForm
from moiety_platform.prices.declared import PriceForm
from moiety_platform.tenants.declared import TenantForm
from moiety_platform.webhooks.declared import WebhookForm

from .conftest import CHART

if TYPE_CHECKING:
    import helm_python

SETS = yaml.load(Path(__file__).with_name("value_sets.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)


def objects_of(chart: helm_python.Chart, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    text = chart.render(values, name="rel", namespace="prod")["moiety/templates/jobs/declared.yaml"]
    return {one["kind"]: one for one in yaml.load_all(text, yaml.CSafeLoader) if one}


def test_the_job_applies_what_the_values_declare(chart: helm_python.Chart, tmp_path: Path) -> None:
    found = objects_of(chart, SETS["declared"])
    file = tmp_path / "declared.yaml"
    file.write_text(found["ConfigMap"]["data"]["declared.yaml"])
    wanted = {(one.kind, one.name) for one in read_declared_objects(read_document(file))}
    assert wanted == {
        ("class", "gold"), ("price", "moiety-demo"), ("route", "best"), ("tenant", "acme"),
        ("project", "acme/web"),
        ("key", "acme/web/ci"), ("limit", "acme: tokens_per_day"), ("limit", "acme: money_per_month"),
        ("guardrail", "no-secrets"), ("guardrail", "acme/acme-answers"), ("issuer", "ci"),
        ("guardrail", "no-secrets"), ("guardrail", "acme/acme-answers"),
        ("key_policy", "acme"), ("user", "acme/ada@example.com"),
    }  # fmt: skip
    assert {"--source=helm", "--prune"} <= {*found["Job"]["spec"]["template"]["spec"]["containers"][0]["args"]}
    assert found["Role"]["rules"][1]["resourceNames"] == ["acme-ci"]


def test_without_declared_keys_the_job_has_no_token_of_the_cluster(chart: helm_python.Chart) -> None:
    found = objects_of(chart, SETS["declared without keys"])
    assert "Role" not in found
    assert found["Job"]["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    "declared",
    [
        {"tenants": [{"name": "a", "wieght": 2}]},
        {"tenants": [{"name": "a", "projects": [{"name": "p", "keys": [{"name": "k"}]}]}]},
        {"tenants": [{"name": "a", "limits": {"tokens_per_hour": 1}}]},
        {"tenants": [{"name": "a", "key_policy": {"max_days": 0}}]},
        {"users": [{"email": "nobody", "role": "viewer"}]},
        {"prices": [{"model": "m", "input": "-1", "output": "2"}]},
        {"prices": [{"model": "m", "input": -1, "output": 2}]},
        {"tenants": [{"name": "a", "limits": {"dollars_per_month": "$500"}}]},
        {"classes": [{"name": "spot", "spot_floor_percent": 0}]},
        {"webhooks": [{"name": "w", "url": "https://x", "keySecret": "w", "format": "teams"}]},
        {"webhooks": [{"name": "w", "url": "https://x", "keySecret": "w", "events": ["weather"]}]},
    ],
)
def test_a_declaration_that_is_none_is_refused_by_the_schema(chart: helm_python.Chart, declared: Any) -> None:
    import helm_python  # not before the fork of workers: it starts threads

    with pytest.raises(helm_python.HelmError, match="declared"):
        chart.render({"declared": declared}, name="rel", namespace="prod")


FORMS = {
    "classes": ClassForm,
    "prices": PriceForm,
    "routes": RouteForm,
    "guardrails": GuardrailForm,
    "issuers": JwtIssuerForm,
    "users": UserForm,
    "webhooks": WebhookForm,
    "tenants": TenantForm,
}


@pytest.mark.parametrize("kind", FORMS)
def test_the_chart_takes_every_field_that_a_file_can_declare(kind: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    properties = schema["properties"]["declared"]["properties"][kind]["items"]["properties"]
    fields = {field.encode_name for field in msgspec.structs.fields(FORMS[kind])}
    assert fields - set(properties) == set()


def test_spot_classes_and_webhooks_for_slack_and_pagerduty_are_declared(
    chart: helm_python.Chart, tmp_path: Path
) -> None:
    declared = {
        "classes": [
            {"name": "spot", "rank": 9, "completion_s": 86400, "on_overload": "queue",
             "spot_floor_percent": 20, "spot_ceiling_percent": 100},
        ],
        "webhooks": [
            {"name": "chat", "url": "https://hooks.slack.com/services/x", "keySecret": "chat", "format": "slack",
             "events": ["engine", "slo"]},
            {"name": "pager", "url": "https://events.pagerduty.com/v2/enqueue", "keySecret": "pager",
             "format": "pagerduty", "routing_key": "0123456789abcdef0123456789abcdef"},
        ],
    }  # fmt: skip
    file = tmp_path / "declared.yaml"
    file.write_text(objects_of(chart, {"declared": declared})["ConfigMap"]["data"]["declared.yaml"])
    found = {one.name: one.fields for one in read_declared_objects(read_document(file))}
    assert (found["spot"]["spot_floor_percent"], found["spot"]["spot_ceiling_percent"]) == (20, 100)
    assert (found["chat"]["format"], found["chat"]["events"]) == ("slack", ["engine", "slo"])
    assert found["pager"]["format"] == "pagerduty"
