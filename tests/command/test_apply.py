"""`moiety apply` against a real gateway: plan, idempotence, what was created by other means, keys in Secrets."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from moiety_podrun.fake_secrets_api import FakeSecretsApi

DEADLINE_S = 60

FILE = """
classes:
  - name: gold
    rank: 0
    ttft_s: 0.25
    tpot_s: 0.02
prices:
  - {model: moiety-demo, input: 0.15, output: "0.60"}
tenants:
  - name: acme
    service_class: gold
    weight: 2
    models: [moiety-demo]
    limits:
      tokens_per_day: 2000000
      dollars_per_month: 500
      alert_at: [50, 80]
    projects:
      - name: web
        limits: {requests_per_minute: 600}
        keys:
          - name: ci
            keySecret: acme-ci
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeSecretsApi]:
    with FakeSecretsApi(tmp_path_factory.mktemp("account")) as running:
        yield running


Moiety = Callable[..., Any]


@pytest.fixture
def moiety(serve: Any, cluster: FakeSecretsApi, called: Moiety) -> Moiety:
    """Run the command on the serve's data directory and the cluster."""
    return partial(called, **cluster.environment, MOIETY_DATA_DIR=str(serve.data_dir))


@pytest.fixture
def apply(moiety: Moiety, cluster: FakeSecretsApi, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Apply a text; the report, with what was printed to standard error as `said`."""

    def run(text: str, *options: str, ends_with: int = 0) -> dict[str, Any]:
        file = tmp_path / "declared.yaml"
        file.write_text(text)
        ended = moiety("apply", "-f", str(file), "--account", str(cluster.folder), "--json", *options)
        assert ended.returncode == ends_with, ended
        return {**json.loads(ended.stdout or "{}"), "said": ended.stderr}

    return run


def deeds(report: dict[str, Any]) -> set[tuple[str, str, str]]:
    idle = ("unchanged",)
    return {(one["action"], one["kind"], one["name"]) for one in report["steps"] if one["action"] not in idle}


def key_in(cluster: FakeSecretsApi, name: str) -> str:
    return base64.b64decode(cluster.secrets[name]["data"]["key"]).decode()


def test_a_file_is_planned_applied_and_then_nothing_is_left_to_do(
    apply: Callable[..., dict[str, Any]], moiety: Moiety, cluster: FakeSecretsApi, serve: Any
) -> None:
    planned = apply(FILE, "--dry-run")
    assert (planned["to_do"], planned["done"], cluster.secrets) == (8, 0, {})
    assert moiety("tenant", "show", "acme").returncode == 1
    assert apply(FILE)["done"] == 8
    again = apply(FILE)
    assert (again["to_do"], again["done"], deeds(again)) == (0, 0, set())
    tenant = json.loads(moiety("tenant", "show", "acme", "--json").stdout)
    assert (tenant["service_class"], tenant["weight"]) == ("gold", 2.0)
    limits = json.loads(moiety("quota", "list", "--json").stdout)["data"]
    assert {(one["level"], one["kind"], one["cap"], *one["alert_at"]) for one in limits} == {
        ("tenant", "tokens_per_day", 2_000_000, 50, 80),
        ("tenant", "money_per_month", 500 * 10**9, 50, 80),
        ("project", "requests_per_minute", 600),
    }
    headers = {"Authorization": f"Bearer {key_in(cluster, 'acme-ci')}"}
    answer = httpx.get(f"{serve.url}/v1/models", headers=headers, timeout=DEADLINE_S)
    assert [one["id"] for one in answer.json()["data"]] == ["moiety-demo"]


def test_drift_of_declared_fields_is_undone_and_what_is_not_declared_is_left(
    apply: Callable[..., dict[str, Any]], moiety: Moiety
) -> None:
    apply(FILE)
    moiety("tenant", "change", "acme", "--weight", "7")
    moiety("quota", "set", "--tenant", "acme", "--concurrent-requests", "5")
    moiety("class", "set", "gold", "--max-queue-s", "9")
    report = apply(FILE)
    assert deeds(report) == {("change", "tenant", "acme")}
    assert next(one["changes"] for one in report["steps"] if one["changes"]) == {"weight": {"before": 7.0, "after": 2}}
    assert json.loads(moiety("class", "show", "gold", "--json").stdout)["max_queue_s"] == 9
    kinds = {one["kind"] for one in json.loads(moiety("quota", "list", "--json").stdout)["data"]}
    assert "concurrent_requests" in kinds


def test_objects_created_by_hand_are_refused_and_the_others_applied(
    apply: Callable[..., dict[str, Any]], moiety: Moiety
) -> None:
    moiety("tenant", "create", "handmade", "--weight", "3")
    text = "tenants:\n  - name: handmade\n    weight: 9\n    limits: {tokens_per_day: 5}\n  - {name: other}\n"
    nothing = apply(text, "--source", "second", ends_with=1)
    assert (nothing["done"], "nothing was done; correct these objects" in nothing["said"]) == (0, True)
    assert moiety("tenant", "show", "other").returncode == 1
    report = apply(text, "--source", "second", "--partial", ends_with=1)
    assert "declared.yaml:2: tenant handmade: created by other means: leave it out" in report["said"]
    assert (report["done"], len(report["failed"])) == (2, 1)
    assert json.loads(moiety("tenant", "show", "handmade", "--json").stdout)["weight"] == 3.0
    assert apply("{}", "--source", "second", "--prune")["done"] == 2  # the other is suspended, the limit deleted
    assert json.loads(moiety("tenant", "show", "handmade", "--json").stdout)["status"] == "active"
    assert json.loads(moiety("tenant", "show", "other", "--json").stdout)["status"] == "suspended"
    assert apply(text, "--source", "second", "--adopt")["done"] == 2
    assert json.loads(moiety("tenant", "show", "handmade", "--json").stdout)["weight"] == 9.0
    elsewhere = apply("tenants: [{name: handmade, weight: 4}]", "--source", "third", "--adopt", ends_with=1)
    assert "declared by 'second'" in elsewhere["said"]


def test_objects_removed_from_the_file_are_deleted_with_prune_only(
    apply: Callable[..., dict[str, Any]], moiety: Moiety, cluster: FakeSecretsApi, serve: Any
) -> None:
    apply(FILE)
    key = key_in(cluster, "acme-ci")
    less = "tenants:\n  - {name: acme, service_class: standard}\n"
    left = apply(less)
    assert {action for action, *_ in deeds(left)} == {"change", "left"}
    assert apply(less)["to_do"] == 0
    assert httpx.get(f"{serve.url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    pruned = apply(less, "--prune")
    assert {kind for action, kind, _ in deeds(pruned) if action == "delete"} == {"limit", "key", "price", "class"}
    assert httpx.get(f"{serve.url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 401
    assert apply(less, "--prune")["to_do"] == 0


def test_a_guardrail_changes_its_check_and_leaves_with_the_file(
    apply: Callable[..., dict[str, Any]], moiety: Moiety
) -> None:
    tenant = "tenants: [{name: guarded}]\nguardrails: [{name: g, stage: input, tenant: guarded, "
    apply(tenant + "detectors: [secrets], action: observe}]\n", "--source=guards")
    (created,) = json.loads(moiety("guardrail", "list", "--json").stdout)["data"]
    assert (created["name"], created["detectors"], created["action"]) == ("g", ["secrets"], "observe")
    assert created["tenant_id"]
    changed = tenant + "detectors: [card_numbers]}]\n"
    apply(changed, "--source=guards")
    assert apply(changed, "--source=guards")["to_do"] == 0
    shown = json.loads(moiety("guardrail", "show", "g", "--json").stdout)
    assert (shown["detectors"], shown["action"]) == (["card_numbers"], "observe"), "it owns only what it sets"
    apply("tenants: [{name: guarded}]\n", "--source=guards", "--prune")
    assert not json.loads(moiety("guardrail", "list", "--json").stdout)["data"]


def test_an_issuer_of_jwts_is_declared_with_its_project_changed_and_removed(
    apply: Callable[..., dict[str, Any]], moiety: Moiety
) -> None:
    file = """
tenants: [{name: trusted, projects: [{name: web}, {name: night}]}]
issuers:
  - {name: ci, url: "https://ci.example.com", audience: moiety, claim: org, required_claims: {env: prod},
     grants: [{claim_value: a, project: trusted/web}, {claim_value: b, project: trusted/night}]}
"""
    apply(file, "--source=issuers")
    shown = json.loads(moiety("issuer", "show", "ci", "--json").stdout)
    assert [grant["project"] for grant in shown["grants"]] == ["trusted/web", "trusted/night"]
    assert apply(file, "--source=issuers")["to_do"] == 0
    changed = file.replace("project: trusted/night", "project: trusted/web")
    apply(changed, "--source=issuers")
    assert apply(changed, "--source=issuers")["to_do"] == 0
    again = json.loads(moiety("issuer", "show", "ci", "--json").stdout)
    assert (again["key_ids"][0], again["required_claims"]) == (shown["key_ids"][0], {"env": "prod"})
    apply("tenants: [{name: trusted, projects: [{name: web}, {name: night}]}]\n", "--source=issuers", "--prune")
    assert not json.loads(moiety("issuer", "list", "--json").stdout)["data"]
    grants = ("--grant", "a=trusted/web,b=trusted/night", "--claim", "org", "--require", "env=prod")
    moiety("issuer", "set", "ci", "--issuer-url", "https://ci.example.com", "--audience", "moiety", *grants)
    listed = moiety("issuer", "list").stdout
    assert "a=trusted/web" in listed and "env=prod" in listed
    moiety("issuer", "delete", "ci")


def test_a_key_whose_secret_was_lost_is_made_anew_and_the_lost_one_revoked(
    apply: Callable[..., dict[str, Any]], cluster: FakeSecretsApi, serve: Any
) -> None:
    apply(FILE)
    old = key_in(cluster, "acme-ci")
    cluster.secrets.pop("acme-ci")
    assert deeds(apply(FILE)) == {("replace", "key", "acme/web/ci")}
    new = key_in(cluster, "acme-ci")
    asked = [httpx.get(f"{serve.url}/v1/models", headers={"Authorization": f"Bearer {one}"}) for one in (old, new)]
    assert [one.status_code for one in asked] == [401, 200]


def test_a_secret_that_holds_something_else_is_left_as_it_is(
    apply: Callable[..., dict[str, Any]], cluster: FakeSecretsApi
) -> None:
    metadata = {"name": "owner", "resourceVersion": "1"}
    cluster.secrets["owner"] = {"metadata": metadata, "data": {"key": base64.b64encode(b"the owner's").decode()}}
    text = "tenants: [{name: greedy, projects: [{name: p, keys: [{name: k, keySecret: owner}]}]}]"
    refused = apply(text, "--source", "greedy", ends_with=1)
    assert "the Secret owner has an entry 'key' that is not this key's" in refused["said"]
    assert key_in(cluster, "owner") == "the owner's"


def test_objects_that_the_gateway_refused_are_not_claimed(apply: Callable[..., dict[str, Any]], moiety: Moiety) -> None:
    text = "tenants: [{name: late, service_class: platinum}]"
    assert "choose one of" in apply(text, "--source", "late", ends_with=1)["said"]
    moiety("tenant", "create", "late")
    refused = apply(text.replace("platinum", "flex"), "--source", "late", ends_with=1)
    assert "tenant late: created by other means" in refused["said"]


def test_a_key_that_no_secret_took_does_not_count(
    apply: Callable[..., dict[str, Any]], cluster: FakeSecretsApi, moiety: Moiety
) -> None:
    text = "tenants: [{name: keyless, projects: [{name: p, keys: [{name: k, keySecret: keyless-k}]}]}]"
    cluster.refuses = {"create"}
    report = apply(text, "--source", "keyless", ends_with=1)
    cluster.refuses = set()
    assert "key keyless/p/k: Kubernetes does not allow this pod to make the Secret" in report["said"]
    listed = json.loads(moiety("key", "list", "--tenant", "keyless", "--json").stdout)["data"]
    assert [one["status"] for one in listed] == ["revoked"]
    assert apply(text, "--source", "keyless")["done"] == 1
    unsaved = apply(text.replace(", keySecret: keyless-k", "2"), "--source", "keyless", ends_with=1)
    assert "its text would be lost: give keySecret" in unsaved["said"]
    shown = apply(text.replace(", keySecret: keyless-k", "2"), "--source", "keyless", "--show-keys")
    assert shown["keys"]["key keyless/p/k2"].startswith("mty_")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tenants:\n  - name: acme\n    wieght: 2\n", ":3: tenants[0].wieght: is not known; did you mean 'weight'?"),
        ("tenents: []\n", ":1: tenents: is not known; did you mean 'tenants'?"),
        ("classes:\n  - name: gold\n    rank: best\n", ":3: classes[0].rank: expected `int`, got `str`"),
        ("prices:\n  - model: m\n    input: cheap\n    output: 1\n", ":3: prices[0].input: "),
        ("tenants:\n  - name: a\n  - name: a\n", ":3: tenants[1]: the tenant 'a' stands on line 2 already"),
        ("tenants:\n  - name: a\n    name: b\n", ":3: tenants[0].name: is given twice"),
        ("tenants: [\n", "this is not valid YAML"),
        ("tenants:\n  - {name: a, projects: [{name: p, keys: [{name: k, secret: x}]}]}\n",
         ":2: tenants[0].projects[0].keys[0].secret: is not known; did you mean 'keySecret'?"),
        ("classes:\n  - {name: gold2, rank: 0}\n", ":2: class gold2: "),
    ],
)  # fmt: skip
def test_errors_are_reported_with_file_line_and_path(
    apply: Callable[..., dict[str, Any]], text: str, said: str
) -> None:
    assert said in apply(text, ends_with=1)["said"]


def test_a_file_that_is_watched_is_applied_again_when_it_changes(moiety: Moiety, serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "watched.yaml"

    def declare(weight: object) -> None:
        beside = tmp_path / ".watched.new"
        beside.write_text(f"tenants:\n  - {{name: watched, weight: {weight}}}\n")
        beside.replace(file)

    declare(2)
    program = "from moiety_platform.cli.main import main; main()"
    options = ("apply", "-f", str(file), "--source", "watched", "--data-dir", str(serve.data_dir), "--watch", "--json")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program, *options], stdout=pipe, stderr=pipe, text=True) as watching:
        try:
            for weight in (2, 3):
                declare(weight)
                assert '"done": 1' in next(line for line in watching.stdout if '"done"' in line)
                assert json.loads(moiety("tenant", "show", "watched", "--json").stdout)["weight"] == weight
                if weight == 2:
                    declare("heavy")
                    assert "weight" in next(line for line in watching.stderr if "Error" in line)
        finally:
            watching.kill()
