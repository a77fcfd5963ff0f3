"""`moiety apply` without Kubernetes: secrets in a file or printed, expiry of keys, and the check of the whole plan."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

DEADLINE_S = 60
LATER = (datetime.now(UTC) + timedelta(days=30)).replace(microsecond=0)

FILE = f"""
tenants:
  - name: acme
    projects:
      - name: web
        keys:
          - {{name: ci, keySecret: acme-ci, expires_at: {LATER.isoformat()}}}
          - {{name: nightly}}
webhooks:
  - {{name: ops, url: "https://ops.example.com/moiety"}}
"""

Moiety = Callable[..., Any]
Apply = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def serve(start_serve: Callable[..., Any]) -> Any:
    running = start_serve("--no-dashboard", "--no-traces")
    running.wait_for_line("moiety is ready at")
    return running


@pytest.fixture
def moiety(serve: Any, called: Moiety, monkeypatch: pytest.MonkeyPatch) -> Moiety:
    for name in [name for name in os.environ if name.startswith("MOIETY_")]:
        monkeypatch.delenv(name)
    return partial(called, MOIETY_DATA_DIR=str(serve.data_dir))


@pytest.fixture
def apply(moiety: Moiety, tmp_path: Path) -> Apply:
    """Apply a text; the report, with what was printed to standard error as `said`."""

    def run(text: str, *options: str, ends_with: int = 0) -> dict[str, Any]:
        file = tmp_path / "declared.yaml"
        file.write_text(text)
        ended = moiety("apply", "-f", str(file), "--json", *options)
        assert ended.returncode == ends_with, ended
        return {**json.loads(ended.stdout or "{}"), "said": ended.stderr}

    return run


def works(serve: Any, key: str) -> bool:
    answer = httpx.get(f"{serve.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=DEADLINE_S)
    return answer.status_code == 200


def actions(report: dict[str, Any]) -> dict[str, str]:
    return {f"{one['kind']} {one['name']}": one["action"] for one in report["steps"] if one["action"] != "unchanged"}


def test_texts_are_kept_in_a_private_file_and_made_anew_when_lost(apply: Apply, serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "secrets.json"
    into = ("--secrets-file", str(file))
    planned = apply(FILE, *into, "--dry-run")
    assert (planned["to_do"], planned["done"], file.exists()) == (5, 0, False)
    assert apply(FILE, *into)["done"] == 5
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    texts = json.loads(file.read_text())
    assert set(texts) == {"acme-ci", "key acme/web/nightly", "webhook ops"}
    assert works(serve, texts["acme-ci"])
    assert works(serve, texts["key acme/web/nightly"])
    assert texts["webhook ops"].startswith("whsec_")
    assert apply(FILE, *into)["to_do"] == 0
    file.write_text(json.dumps(texts | {"acme-ci": ""}))
    assert actions(apply(FILE, *into)) == {"key acme/web/ci": "replace"}
    new = json.loads(file.read_text())["acme-ci"]
    assert (works(serve, texts["acme-ci"]), works(serve, new)) == (False, True)


def test_a_key_expires_as_declared_and_a_later_expiry_replaces_it(
    apply: Apply, moiety: Moiety, serve: Any, tmp_path: Path
) -> None:
    into = ("--source", "expiry", "--secrets-file", str(tmp_path / "expiry.json"))
    text = "tenants: [{name: brief, projects: [{name: p, keys: [{name: k, expires_at: %s}]}]}]"
    apply(text % LATER.isoformat(), *into)
    (made,) = json.loads(moiety("key", "list", "--tenant", "brief", "--json").stdout)["data"]
    assert datetime.fromisoformat(made["expires_at"]) == LATER
    assert apply(text % LATER.astimezone().isoformat(), *into)["to_do"] == 0
    later = apply(text % (LATER + timedelta(days=1)).isoformat(), *into)
    assert actions(later) == {"key brief/p/k": "replace"}
    states = [one["status"] for one in json.loads(moiety("key", "list", "--tenant", "brief", "--json").stdout)["data"]]
    assert states == ["revoked", "active"]
    moiety("key", "rotate", "k", "--tenant", "brief")
    rotated = apply(text % LATER.isoformat(), *into)
    assert (rotated["to_do"], [one["why"] for one in rotated["steps"]][-1]) == (0, "rotated by hand, and left so")
    past = apply((text % "2020-01-01T00:00:00Z").replace("brief", "late"), *into, ends_with=1)
    assert "key late/p/k" in past["said"]
    assert moiety("tenant", "show", "late").returncode == 1
    naive = apply(text % "2031-01-01T00:00:00", *into, ends_with=1)
    assert "tenants[0].projects[0].keys[0].expires_at" in naive["said"]


def test_texts_are_printed_instead(apply: Apply, serve: Any) -> None:
    text = "tenants: [{name: printed, projects: [{name: p, keys: [{name: k, keySecret: printed-k}]}]}]"
    into = ("--source", "printed", "--secrets-file", "-")
    assert works(serve, apply(text, *into)["keys"]["key printed/p/k"])
    again = apply(text, *into)
    assert (again["to_do"], again["keys"]) == (0, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tenants: [{name: a1}, {name: a2, weight: -1}]", "tenant a2: "),
        ("tenants: [{name: a1}, {name: a2, service_class: platinum}]", "tenant a2: "),
        ("tenants: [{name: a1, limits: {tokens_per_day: -5}}]", "limit a1: tokens_per_day: "),
        ("tenants: [{name: a1}]\nwebhooks: [{name: w, url: 'https://127.0.0.1/'}]", "webhook w: "),
        ("tenants: [{name: a1}]\nprices: [{model: m, input: 1, output: 1, service_class: none}]", "price m in none"),
        ("tenants: [{name: a1, projects: [{name: p, keys: [{name: k, keySecret: x}, {name: l, keySecret: x}]}]}]",
         "its keySecret 'x' is also that of another object"),
    ],
)  # fmt: skip
def test_nothing_is_done_if_the_gateway_would_refuse_an_object(
    apply: Apply, moiety: Moiety, tmp_path: Path, text: str, said: str
) -> None:
    options = ("--source", "refused", "--secrets-file", str(tmp_path / "s.json"))
    before = moiety("audit", "verify").stdout
    for more in ((), ("--dry-run",)):
        report = apply(text, *options, *more, ends_with=1)
        assert said in report["said"]
        assert report["done"] == 0
    assert ("nothing was done" in report["said"]) is False  # a dry run does nothing anyway
    assert moiety("tenant", "show", "a1").returncode == 1
    assert moiety("audit", "verify").stdout == before
    assert json.loads(moiety("tenant", "list", "--json").stdout)["data"]
    assert not (tmp_path / "s.json").exists()


def test_a_new_class_and_its_tenants_are_one_plan(apply: Apply, moiety: Moiety) -> None:
    text = """
classes: [{name: gold, rank: 0, ttft_s: 0.25, tpot_s: 0.02, on_overload: downgrade, downgrade_to: silver},
          {name: silver, rank: 1, ttft_s: 1, tpot_s: 0.1}]
prices: [{model: moiety-demo, input: 1, output: 2, service_class: gold}]
tenants: [{name: golden, service_class: gold, limits: {dollars_per_day: 5}}]
"""
    assert apply(text, "--source", "classes")["done"] == 5
    assert apply(text, "--source", "classes")["to_do"] == 0


def test_unknown_models_are_warned_about(apply: Apply) -> None:
    text = "prices: [{model: m7, input: 1, output: 1}]\ntenants: [{name: w1, models: [moiety-demo, m8]}]"
    said = apply(text, "--source", "models", "--dry-run")["said"]
    assert "warning: no engine serves the model 'm7'; served are: moiety-demo" in said
    assert "moiety-demo'" not in said


@pytest.mark.parametrize(
    ("content", "said"), [("[]", "is no JSON object of texts"), ("{", "cannot be read"), (None, "cannot be written")]
)
def test_a_file_of_secrets_that_cannot_be_used_stops_the_plan(
    apply: Apply, moiety: Moiety, tmp_path: Path, content: str | None, said: str
) -> None:
    file = tmp_path / "folder" / "secrets.json"
    if content is not None:
        file.parent.mkdir()
        file.write_text(content)
    text = "tenants: [{name: unsaved, projects: [{name: p, keys: [{name: k}]}]}]"
    report = apply(text, "--source", "unsaved", "--secrets-file", str(file), ends_with=1)
    assert said in report["said"]
    assert moiety("tenant", "show", "unsaved").returncode == 1


def test_a_dry_run_changes_nothing_and_is_refused_where_it_would(serve: Any, moiety: Moiety) -> None:
    admin = httpx.Client(base_url=f"{serve.url}/admin/v1", headers={"Authorization": f"Bearer {serve.admin_key}"})
    dry = {"X-Moiety-Dry-Run": "true"}
    with admin:
        checked = admin.post("/tenants", json={"name": "dry"}, headers=dry)
        assert (checked.status_code, checked.content) == (204, b"")
        assert admin.get("/tenants", params={"name": "dry"}).json()["data"] == []
        wrong = admin.post("/tenants", json={"name": "dry", "weight": -1}, headers=dry)
        assert wrong.status_code == 400
        made = admin.post("/tenants", json={"name": "wet"}).json()
        without = [
            ("DELETE", f"/tenants/{made['id']}/data"),
            ("DELETE", "/prices"),
            ("POST", "/simulations"),
            ("POST", "/contract-checks"),
            ("POST", "/engines/x/sleep"),
            ("POST", "/keys/x/revoke"),
            ("PUT", "/declarations"),
        ]
        for method, path in without:
            refused = admin.request(method, path, headers=dry, json={})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_dry_run"), path
        odd = admin.patch(f"/tenants/{made['id']}", json={"weight": 3}, headers={"X-Moiety-Dry-Run": "yes"})
        assert odd.json()["error"]["code"] == "invalid_dry_run"
        assert admin.get(f"/tenants/{made['id']}").json()["weight"] == 1.0
