"""An operator's day on a terminal of 100 columns: every line fits, and no name, id or key is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.cells import cell_len
from tests.conftest import wait_for

DEADLINE_S = 60
COLUMNS = 100
TENANT, PROJECT, KEY = "acme-research-laboratories", "web-frontend-production", "continuous-integration"
WEBHOOK = "https://ops.example.com/hooks/moiety/alerts"
ID = re.compile(r"\b(?:ten|prj|quo|whk)_[a-z0-9]{20}\b")

DECLARED = """
tenants:
  - name: globex-corporation-international
    weight: 2
    limits: {tokens_per_day: 2000000, dollars_per_month: "500", alert_at: [50, 80]}
    projects:
      - name: data-science
        keys: [{name: notebooks, keySecret: notebooks, models: [moiety-demo]}]
"""

Day = Callable[..., str]


@pytest.fixture
def day(serve: Any, moiety: Callable[..., Any], on_terminal: Callable[..., Any]) -> Day:
    """Run a command on the terminal; it must end so, and fit."""

    def run(*arguments: str, ends_with: int = 0) -> str:
        screen = on_terminal(*arguments, MOIETY_DATA_DIR=str(serve.data_dir))
        assert screen.returncode == ends_with, screen.text
        too_long = [line for line in screen.text.splitlines() if cell_len(line) > COLUMNS]
        assert not too_long, (arguments, too_long)
        assert "…" not in screen.text, (arguments, screen.text)
        return str(screen.text)

    return run


def rows(moiety: Callable[..., Any], *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(moiety(*arguments, "--json").stdout)["data"]
    return found


def test_a_day_of_commands_fits_the_terminal(day: Day, moiety: Callable[..., Any], serve: Any, tmp_path: Path) -> None:
    assert TENANT in day("tenant", "create", TENANT, "--class", "priority")
    day("project", "create", PROJECT, "--tenant", TENANT)
    made = day("key", "create", KEY, "--tenant", TENANT, "--project", PROJECT, "--expires-in-days", "30")
    key, *told = made.splitlines()
    (listed,) = rows(moiety, "key", "list", "--tenant", TENANT)
    assert key.startswith(f"mty_{listed['id']}.")
    assert told[-1].startswith(f"id {listed['id']}, expires 20")
    assert "warning: no engine serves the model 'm9'; served are: moiety-demo" in day(
        "key", "create", "strict", "--tenant", TENANT, "--model", "m9", "--model", "moiety-demo"
    )
    assert "warning: no engine serves the model 'm9'" in day("price", "set", "m9", "--input", "1", "--output", "2")
    assert "warning" not in day("price", "set", "moiety-demo", "--input", "1", "--output", "2")
    day("price", "list")
    day("quota", "set", "--tenant", TENANT, "--tokens-per-day", "100000", "--alert-at", "50,80")
    day("quota", "set", "--project", f"{TENANT}/{PROJECT}", "--requests-per-minute", "600")
    day("quota", "set", "--key", KEY, "--concurrent-requests", "50")
    day("webhook", "create", WEBHOOK)
    body = {"model": "moiety-demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    for _ in range(3):
        headers = {"Authorization": f"Bearer {key}"}
        httpx.post(
            f"{serve.url}/v1/chat/completions", json=body, headers=headers, timeout=DEADLINE_S
        ).raise_for_status()
    wait_for(lambda: len(rows(moiety, "usage", "--requests", "9")) == 3, "the rows, which are written with others")
    lists = [
        ("tenant", "list"), ("project", "list"), ("key", "list"), ("quota", "list"), ("webhook", "list"),
    ]  # fmt: skip
    for command in lists:
        shown = day(*command)
        for row in rows(moiety, *command):
            assert row["id"] in shown
            assert row.get("name", "") in shown
    assert WEBHOOK in day("webhook", "list")
    assert "flex" in day("class", "list")
    assert "flex" in day("class", "show", "flex")
    assert "200" in day("class", "set", "flex", "--max-queue-s", "200")
    assert TENANT in day("usage")
    assert TENANT in day("usage", "--by", "tenant,project,key,model,service_class")
    assert TENANT in day("usage", "--key", KEY, "--project", PROJECT, "--model", "moiety-demo")
    requests = day("usage", "--requests", "9")
    assert all(row["request_id"] in requests for row in rows(moiety, "usage", "--requests", "9"))
    assert "requests, ledger and sums agree" in day("usage", "reconcile", "--hours", "2")
    audit = day("audit", "list", "--last", "100")
    assert set(ID.findall(audit)) == set(ID.findall(moiety("audit", "list", "--last", "100").stdout))
    day("audit", "list", "--object", TENANT)
    day("audit", "verify")
    day("config", "show")
    day("tenant", "change", TENANT, "--weight", "2")
    file = tmp_path / "in.jsonl"
    line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file.write_text(json.dumps(line) + "\n")
    declared = tmp_path / "declared.yaml"
    declared.write_text(DECLARED)
    applied = ("apply", "-f", str(declared), "--secrets-file", str(tmp_path / "secrets.json"))
    for shown in (day(*applied, "--dry-run"), day(*applied)):
        assert "create key globex-corporation-international/data-science/notebooks" in shown
        assert "    weight: 2" in shown
    declared.write_text(DECLARED.replace("weight: 2", "weight: 3"))
    assert "declared by 'default'" in day(*applied, "--source", "other", ends_with=1)
    backup = tmp_path / "backup"
    assert "sqlite, revision" in day("backup", "--output", str(backup), "--data-dir", str(serve.data_dir))
    restored = ("restore", str(backup), "--data-dir", str(tmp_path / "restored"))
    assert "audit head" in day(*restored)
    assert "the target is not empty" in day(*restored, ends_with=1)
    assert "the pepper fits" in day("doctor", "--data-dir", str(serve.data_dir), "--url", serve.url)
    bundle = day("support-bundle", "--output", str(tmp_path / "bundle.tar.gz"), "--url", serve.url)
    assert "read it before you share it" in " ".join(bundle.split())
    batch = json.loads(moiety("batch", "submit", str(file), "--wait", "--json").stdout)["id"]
    assert batch in day("batch", "list")
    assert batch in day("batch", "status", batch)


def test_a_key_is_rotated_and_revoked_by_its_name(day: Day, moiety: Callable[..., Any]) -> None:
    moiety("tenant", "create", "rotating")
    moiety("key", "create", "nightly", "--tenant", "rotating")
    for command in ("rotate", "revoke"):
        refused = " ".join(day("key", command, "nightly", ends_with=1).split())
        assert "'nightly' is a name of rotating/default now, and can be one of another tenant" in refused
    (old,) = rows(moiety, "key", "list", "--tenant", "rotating")
    told = day("key", "rotate", "nightly", "--tenant", "rotating", "--grace-s", "3600").splitlines()
    new = next(one for one in rows(moiety, "key", "list", "--tenant", "rotating") if one["id"] != old["id"])
    assert told[0].startswith(f"mty_{new['id']}.")
    assert f"id {new['id']}, does not expire" in told
    assert told[-1].startswith(f"the old key {old['id']} is valid until 20")
    ambiguous = day("key", "revoke", "nightly", ends_with=1)
    assert "2 active keys are named 'nightly'" in ambiguous
    assert f"{old['id']} (of rotating/default, expires 20" in ambiguous
    assert f"{new['id']} (of rotating/default, no expiry)" in ambiguous
    day("key", "revoke", f"mty_{old['id']}")
    assert "revoked" in day("key", "revoke", "nightly", "--tenant", "rotating")
    assert "no active key is named 'nightly'" in day("key", "revoke", "nightly", ends_with=1)
    assert "no key with the id or name 'weekly'" in day("key", "rotate", "weekly", ends_with=1)


def test_administrators_keys_of_all_tenants_are_revoked_by_their_names(day: Day, moiety: Callable[..., Any]) -> None:
    moiety("key", "create", "pager", "--role", "viewer")
    assert "revoked" in day("key", "revoke", "pager")


def test_projects_webhooks_and_quotas_are_found_by_names(day: Day, moiety: Callable[..., Any]) -> None:
    for tenant in ("east", "west"):
        moiety("tenant", "create", tenant)
        moiety("project", "create", "shared", "--tenant", tenant)
    unclear = day("quota", "set", "--project", "shared", "--tokens-per-day", "5", ends_with=1)
    assert "2 tenants have a project 'shared'; give one as TENANT/NAME:" in unclear
    assert "  east/shared\n" in unclear
    day("quota", "set", "--project", "west/shared", "--tokens-per-day", "5")
    (limit,) = rows(moiety, "quota", "list", "--project", "west/shared")
    west = next(one for one in rows(moiety, "project", "list", "--tenant", "west") if one["name"] == "shared")
    assert limit["scope_id"] == west["id"]
    moiety("webhook", "create", "https://example.com/hook")
    assert "https://example.com/hook" in day("webhook", "delete", "https://example.com/hook")
    assert "no webhook has the address" in day("webhook", "delete", "https://example.com/hook", ends_with=1)
    assert "no tenant has an adapter 'moiety-demo:none'" in day("adapter", "remove", "moiety-demo:none", ends_with=1)


def test_runs_are_found_by_names_and_routes_warn_of_unknown_models(
    day: Day, moiety: Callable[..., Any], serve: Any
) -> None:
    body = {"model": "moiety-demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    headers = {"Authorization": f"Bearer {serve.tenant_key}", "x-moiety-run": "night-shift; budget-tokens=500"}
    httpx.post(f"{serve.url}/v1/chat/completions", json=body, headers=headers, timeout=DEADLINE_S).raise_for_status()
    (run,) = rows(moiety, "run", "list")
    listed = day("run", "list")
    assert "demo" in listed and run["tenant_id"] not in listed
    assert run["id"] in day("run", "show", "night-shift")
    for tenant in (), ("--tenant", "elsewhere"):
        moiety("tenant", "create", "elsewhere")
        assert "night-shift" in day("run", "stop", "night-shift", *tenant, ends_with=1)
        (open_run,) = rows(moiety, "run", "list")
        assert open_run["status"] == "active"
    admin = moiety("key", "create", "demo-boss", "--role", "tenant-admin", "--tenant", "demo").stdout.strip()
    assert "stopped" in day("run", "stop", "night-shift", "--admin-key", admin), "it sees one tenant only"
    for name in "night-shift", run["id"]:
        assert "stopped" in day("run", "stop", name, *(("--tenant", "demo") if name != run["id"] else ()))
    assert "no run with the id or name 'day-shift'" in day("run", "show", "day-shift", ends_with=1)
    told = day("route", "set", "best", "--to", "moiety-demo=95,canary=5", "--fallback", "last", "--shadow-to", "next",
               "--shadow-percent", "5")  # fmt: skip
    for model in ("canary", "last", "next"):
        assert f"warning: no engine serves the model '{model}'; served are: moiety-demo" in told
    assert "'moiety-demo'" not in told


def test_usage_is_of_a_period(day: Day, moiety: Callable[..., Any], serve: Any) -> None:
    body = {"model": "moiety-demo", "prompt": "hello", "max_tokens": 1, "user": "ada"}
    headers = {"Authorization": f"Bearer {serve.tenant_key}"}
    httpx.post(f"{serve.url}/v1/completions", json=body, headers=headers, timeout=DEADLINE_S).raise_for_status()

    def used(*period: str) -> int:
        report = json.loads(moiety("usage", "--tenant", "demo", "--end-user", "ada", *period, "--json").stdout)
        return sum(one["totals"]["requests"] for one in report["data"])

    wait_for(lambda: used("--hours", "24") == 1, "the row, which is written with others")
    assert used("--from", "2026-01-01", "--to", "2026-01-02T08:00Z") == 0
    assert used("--to", "2026-01-02", "--hours", "5") == 0
    assert "requests: 0" in day("usage", "reconcile", "--from", "2026-01-01", "--to", "2026-01-02")
    for wrong in (
        ("--from", "tomorrow"),
        ("--from", "2026-01-02", "--to", "2026-01-01"),
        ("--hours", "2", "--from", "2026-01-01"),
    ):
        assert "Invalid value" in day("usage", *wrong, ends_with=2)


def test_wide_and_a_pipe_show_every_column_whole(
    day: Day, on_terminal: Callable[..., Any], moiety: Callable[..., Any], serve: Any
) -> None:
    name = "t" * 90
    made = json.loads(moiety("tenant", "create", name, "--json").stdout)
    narrow = day("tenant", "list")
    assert name in narrow
    assert made["id"] in narrow
    wide = on_terminal("tenant", "list", "--wide", MOIETY_DATA_DIR=str(serve.data_dir)).text
    assert wide == moiety("tenant", "list").stdout
    for text in (name, "speculative prefill", "created"):
        assert text in wide
    assert len({len(line) for line in wide.splitlines()}) == 1
