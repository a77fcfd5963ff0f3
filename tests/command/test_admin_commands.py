"""The administration commands and the load generator, against a real gateway."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.conftest import wait_for

from moiety_platform.gpu_driver import has_gpu_driver
from moiety_wire.classes import CPU_SLOS, PRIORITY, STANDARD

DEADLINE_S = 60


def test_a_tenant_is_made_changed_suspended_and_resumed(moiety: Callable[..., Any]) -> None:
    made = json.loads(moiety("tenant", "create", "acme", "--class", "priority", "--weight", "2", "--json").stdout)
    assert (made["service_class"], made["weight"], made["status"]) == ("priority", 2.0, "active")
    assert json.loads(moiety("tenant", "change", "acme", "--weight", "3", "--json").stdout)["weight"] == 3.0
    assert json.loads(moiety("tenant", "suspend", "acme", "--json").stdout)["status"] == "suspended"
    assert json.loads(moiety("tenant", "resume", made["id"], "--json").stdout)["status"] == "active"
    listed = moiety("tenant", "list").stdout
    assert "acme" in listed
    assert made["id"] in listed  # whole, although this is no terminal


def test_a_class_is_listed_shown_set_made_and_deleted(moiety: Callable[..., Any], serve: Any) -> None:
    listed = moiety("class", "list").stdout
    for word in ("priority", "reject", "86,400", "0.5"):
        assert word in listed
    classes = {one["name"]: one for one in json.loads(moiety("class", "list", "--json").stdout)["data"]}
    assert list(classes) == ["priority", "standard", "flex", "batch"]
    for expected in (PRIORITY, STANDARD) if has_gpu_driver() else CPU_SLOS:
        assert msgspec.to_builtins(expected).items() <= classes[expected.name].items()
    made = json.loads(moiety("class", "create", "gold", "--rank", "0", "--ttft-s", "0.25", "--tpot-s", "0.02",
                             "--not-preemptible", "--price-factor", "2", "--json").stdout)  # fmt: skip
    assert (made["rank"], made["ttft_s"], made["preemptible"], made["price_factor"]) == (0, 0.25, False, 2.0)
    changed = json.loads(moiety("class", "set", "gold", "--tpot-s", "none", "--on-overload", "downgrade",
                                "--downgrade-to", "standard", "--json").stdout)  # fmt: skip
    assert (changed["tpot_s"], changed["downgrade_to"]) == (None, "standard")
    assert "0.25" in moiety("class", "show", "gold").stdout
    moiety("tenant", "create", "golden", "--class", "gold")
    refused = moiety("class", "delete", "gold")
    assert (refused.returncode, "Tenants use the class 'gold'" in refused.stderr) == (1, True)
    moiety("tenant", "change", "golden", "--class", "flex")
    assert json.loads(moiety("class", "delete", "gold", "--json").stdout)["name"] == "gold"
    assert moiety("class", "show", "gold").returncode == 1


def test_an_edited_class_is_that_of_the_next_request(moiety: Callable[..., Any], serve: Any) -> None:
    made = moiety("tenant", "create", "switching", "--json")
    key = moiety("key", "create", "k", "--tenant", "switching").stdout.strip()
    body = {"model": "moiety-demo", "messages": [{"role": "user", "content": "hello"}], "service_tier": "flex"}

    def stated() -> str:
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{serve.url}/v1/chat/completions", json=body, headers=headers, timeout=DEADLINE_S)
        assert answer.headers["x-moiety-admission"] == "in_time"
        return answer.headers["x-moiety-class"]

    assert (made.returncode, stated()) == (0, "flex")
    assert moiety("class", "set", "flex", "--rank", "1").returncode == 0  # not below the tenant's own any more
    assert stated() == "standard"
    assert moiety("class", "set", "flex", "--rank", "2").returncode == 0
    assert stated() == "flex"


def test_a_key_is_made_used_rotated_and_revoked(moiety: Callable[..., Any], serve: Any) -> None:
    moiety("tenant", "create", "keys-inc")
    made = moiety("key", "create", "ci", "--tenant", "keys-inc")
    key = made.stdout.strip()
    assert "not shown again" in made.stderr
    assert asks(serve, key) == 200
    key_id = key.removeprefix("mty_").partition(".")[0]
    rotated = json.loads(moiety("key", "rotate", key_id, "--grace-s", "0", "--json").stdout)
    assert asks(serve, rotated["secret"]) == 200
    assert asks(serve, key) == 401
    assert moiety("key", "revoke", rotated["key"]["id"]).returncode == 0
    assert asks(serve, rotated["secret"]) == 401
    listed = json.loads(moiety("key", "list", "--tenant", "keys-inc", "--json").stdout)["data"]
    assert {one["status"] for one in listed} == {"expired", "revoked"}


def test_administrators_have_roles_and_one_of_a_tenant_reaches_no_other(moiety: Callable[..., Any]) -> None:
    for tenant in ("north", "south"):
        moiety("tenant", "create", tenant)
        moiety("key", "create", "app", "--tenant", tenant)
    made = json.loads(moiety("key", "create", "boss", "--role", "tenant-admin", "--tenant", "north", "--json").stdout)
    viewer = moiety("key", "create", "watch", "--role", "viewer").stdout.strip()
    north = {"MOIETY_ADMIN_KEY": made["secret"]}
    listed = moiety("key", "list", "--role", "tenant-admin").stdout
    assert made["key"]["id"] in listed
    assert made["key"]["tenant_id"] in listed
    assert [one["name"] for one in json.loads(moiety("tenant", "list", "--json", **north).stdout)["data"]] == ["north"]
    assert moiety("key", "create", "more", "--tenant", "north", **north).returncode == 0
    assert moiety("tenant", "show", "south", **north).returncode == 1
    for refused in (
        moiety("key", "create", "x", "--role", "owner", **north),
        moiety("tenant", "change", "north", "--class", "priority", **north),
        moiety("quota", "set", "--tenant", "north", "--tokens-per-day", "5", **north),
        moiety("key", "create", "x", "--tenant", "north", MOIETY_ADMIN_KEY=viewer),
    ):
        assert (refused.returncode, "needs the role 'owner'" in refused.stderr) == (4, True), refused.stderr
    assert "tenant-admin" in moiety("audit", "list", **north).stdout
    unverified = moiety("audit", "verify", **north)
    assert (unverified.returncode, "owner's key" in unverified.stderr) == (1, True)
    assert moiety("audit", "verify").returncode == 0


def test_prices_and_limits_on_money_are_given_in_dollars(moiety: Callable[..., Any]) -> None:
    made = json.loads(moiety("price", "set", "large", "--input", "0.15", "--output", "0.6", "--json").stdout)
    assert (made["input"], made["cached_input"], made["service_class"]) == ("0.15", "0.15", None)
    assert "0.15" in moiety("price", "list").stdout
    assert moiety("price", "set", "large", "--input", "cheap", "--output", "1").returncode == 1
    assert moiety("price", "delete", "large").returncode == 0
    moiety("tenant", "create", "spender")
    arguments = ("--tenant", "spender", "--dollars-per-day", "12.5", "--requests-per-minute", "60")
    limits = json.loads(moiety("quota", "set", *arguments, "--json").stdout)["data"]
    assert {limit["kind"]: limit["cap"] for limit in limits} == {
        "requests_per_minute": 60,
        "money_per_day": 12_500_000_000,
    }
    assert "$ 12.5" in moiety("quota", "list", "--tenant", "spender").stdout
    assert moiety("quota", "set", "--tenant", "spender", "--dollars-per-day", "much").returncode == 2


def test_the_audit_log_is_shown_and_verified(moiety: Callable[..., Any]) -> None:
    tenant = json.loads(moiety("tenant", "create", "watched", "--json").stdout)
    moiety("tenant", "change", "watched", "--weight", "5")
    shown = moiety("audit", "list", "--object", tenant["id"]).stdout
    assert "weight: 1.0 → 5.0" in shown
    head = json.loads(moiety("audit", "verify", "--json").stdout)["head"]
    moiety("tenant", "suspend", "watched")
    assert moiety("audit", "verify", "--expect", head).returncode == 0
    cut = moiety("audit", "verify", "--expect", f"999:{'0' * 64}")
    assert cut.returncode == 1
    assert "truncated or replaced" in cut.stderr


def test_a_batch_is_submitted_followed_and_fetched(moiety: Callable[..., Any], tmp_path: Path) -> None:
    body = {"model": "moiety-demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"custom_id": f"n{n}", **line}) + "\n" for n in range(30)))
    done = moiety("batch", "submit", str(file), "--wait", "--json")
    assert done.returncode == 0, done.stderr
    batch = json.loads(done.stdout)
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 30)
    assert batch["id"] in done.stderr
    output = moiety("batch", "results", batch["id"]).stdout
    assert [json.loads(one)["custom_id"] for one in output.splitlines()] == [f"n{n}" for n in range(30)]
    moiety("batch", "results", batch["id"], "--output", str(tmp_path / "out.jsonl"))
    assert (tmp_path / "out.jsonl").read_text() == output
    assert "completed" in moiety("batch", "status", batch["id"]).stdout
    assert batch["id"] in moiety("batch", "list").stdout
    assert moiety("batch", "results", batch["id"], "--errors").returncode == 1
    over = moiety("batch", "cancel", batch["id"])
    assert (over.returncode, "nothing to cancel" in over.stderr) == (1, True)
    assert moiety("batch", "status", batch["id"], "--key", "mty_no.such").returncode == 4
    file.write_text("nonsense\n")
    assert moiety("batch", "submit", str(file)).returncode == 1
    bad = moiety("batch", "submit", str(file), "--endpoint", "/v1/completions", "--wait")
    assert (bad.returncode, "invalid_json_line" in bad.stdout) == (1, True)


def test_usage_is_summed_by_tenant(moiety: Callable[..., Any], serve: Any) -> None:
    moiety("tenant", "create", "summed-inc")
    key = moiety("key", "create", "ci", "--tenant", "summed-inc").stdout.strip()
    body = {"model": "moiety-demo", "messages": [{"role": "user", "content": "hello"}]}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{serve.url}/v1/chat/completions", json=body, headers=headers, timeout=DEADLINE_S).json()
    tokens = answer["usage"]["completion_tokens"]

    def used() -> int:
        report = json.loads(moiety("usage", "--tenant", "summed-inc", "--json").stdout)
        return sum(one["totals"]["output_tokens"] for one in report["data"])

    wait_for(lambda: used() == tokens, "the row, which is written with others")
    lines = moiety("usage", "--by", "tenant,model").stdout.replace("┃", "│").splitlines()
    headings, *rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert (headings[:3], headings[-2:]) == (["tenant", "model", "requests"], ["guarantees met", "SLO attained"])
    assert not any("nanodollars" in heading for heading in headings)
    assert ["summed-inc", "moiety-demo", "1"] in [row[:3] for row in rows]
    (exported,) = csv.DictReader(moiety("usage", "--tenant", "summed-inc", "--csv").stdout.splitlines())
    assert (exported["tenant_name"], int(exported["output_tokens"])) == ("summed-inc", tokens)
    assert int(exported["cost_nanodollars"]) == 0
    assert moiety("usage", "--csv", "--json").returncode == 2
    by_class = moiety("usage", "--by", "service_class").stdout
    assert "SLO attained" in by_class
    assert "standard" in by_class
    single = json.loads(moiety("usage", "--requests", "1", "--json").stdout)["data"][0]
    assert (single["service_class"], single["num_preemptions"], single["slo_attained"]) == ("standard", 0, True)


def test_usage_is_summed_and_exported_by_end_user_and_tag(moiety: Callable[..., Any], serve: Any) -> None:
    moiety("tenant", "create", "apps-inc")
    key = moiety("key", "create", "ci", "--tenant", "apps-inc").stdout.strip()
    for user, feature in (("ann", "chat"), ("ann", "search"), ("bob", "chat")):
        headers = {"Authorization": f"Bearer {key}", "X-Moiety-Tags": f"team=web, feature={feature}"}
        body = {"model": "moiety-demo", "prompt": "hello", "max_tokens": 1, "user": user}
        httpx.post(f"{serve.url}/v1/completions", json=body, headers=headers, timeout=DEADLINE_S).raise_for_status()

    def sums(*options: str) -> dict[str, int]:
        rows = csv.DictReader(moiety("usage", "--tenant", "apps-inc", "--csv", *options).stdout.splitlines())
        return {next(iter(row.values())): int(row["requests"]) for row in rows}

    wait_for(lambda: sums("--by", "end_user") == {"ann": 2, "bob": 1}, "the rows, which are written with others")
    assert sums("--by", "tag:feature") == {"chat": 2, "search": 1}
    assert sums("--by", "tag:feature", "--end-user", "ann") == {"chat": 1, "search": 1}
    assert sums("--by", "end_user", "--tag", "feature=search") == {"ann": 1}
    assert "ann" in moiety("usage", "--by", "end_user", "--tenant", "apps-inc").stdout
    (row,) = csv.DictReader(
        moiety("usage", "--requests", "9", "--tenant", "apps-inc", "--end-user", "bob", "--csv").stdout.splitlines()
    )
    assert (row["end_user"], row["tags"]) == ("bob", "feature=chat, team=web")
    assert moiety("usage", "--tag", "feature").returncode != 0


def test_the_doctor_finds_the_trace_store_of_a_serve(moiety: Callable[..., Any]) -> None:
    wait_for(lambda: "which is ready" in moiety("doctor", "--only", "traces").stdout, "the trace store")
    assert "the running gateway sends traces to http://127.0.0.1:" in moiety("doctor", "--only", "traces").stdout


def test_a_serve_that_reads_no_file_takes_no_change_of_one(moiety: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "moiety.toml"
    file.write_text("[gateway]\nmax_choices = 3\n")
    told = moiety("config", "check", str(file), "--against", "running").stdout
    assert "max_choices: 16 becomes 3 never: the gateway reads no configuration file" in told
    shown = moiety("config", "show").stdout
    assert "the gateway reads no configuration file" in shown


def test_the_load_generator_reports_its_figures_in_one_object(serve: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(
        f"{index / 50},t{index % 2},{5 + index},{3 + index % 4},{'flex' if index % 5 == 0 else ''}\n"
        for index in range(20)
    )
    trace.write_text("arrival_s,tenant,input_tokens,output_tokens,class\n" + rows)
    options = ["--url", serve.url, "--key", serve.tenant_key, "--trace", str(trace), "--json"]
    command = [sys.executable, "-m", "moiety_platform.cli", "bench", "serve", *options]  # alone, as its figures want it
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["completed"], report["errors"]) == (20, 0)
    assert set(report["classes"]) == {"flex", "standard"}
    assert report["classes"]["flex"]["attainment"] == 1
    assert report["goodput_tokens_per_s"] > 0
    assert 0 < report["ttft_ms"]["p50"] <= report["ttft_ms"]["p99"] <= report["e2e_ms"]["p99"]
    assert report["environment"]["versions"]["moiety"]
    assert done.stderr == ""  # no progress bar in a pipe


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("tenant", "show", "nobody"), 1, "no tenant"),
        (("tenant", "change", "demo"), 2, "nothing to change"),
        (("tenant", "create", "x", "--class", "gold"), 1, "choose one of: priority, standard, flex, batch"),
        (("class", "set", "standard"), 2, "nothing to change"),
        (("class", "set", "standard", "--ttft-s", "soon"), 2, "must be seconds"),
        (("class", "set", "standard", "--on-overload", "downgrade"), 1, "choose one of: batch, flex"),
        (("class", "show", "gold"), 1, "no class"),
        (("class", "delete", "flex"), 1, "change it instead"),
        (("key", "create", "x"), 2, "--tenant, --role or both"),
        (("key", "create", "x", "--role", "tenant-admin"), 2, "is for one tenant"),
        (("key", "create", "x", "--role", "owner", "--tenant", "demo"), 2, "is for all tenants"),
        (("key", "create", "x", "--role", "king"), 2, "tenant-admin"),
        (("key", "list", "--admin-key", "mty_wrong"), 4, "key"),
        (("usage", "--url", "http://127.0.0.1:9"), 3, "is it running?"),
        (("tenant", "list", "--data-dir", "/nonexistent"), 1, "--admin-key"),
        (("bench", "serve", "--key", "k", "--trace", "/nonexistent.csv"), 1, "cannot read"),
        (("bench", "serve", "--key", "k"), 2, "--rate"),
        (("serve", "--config", "/nonexistent.toml"), 2, "cannot read"),
        (("serve", "--host", "256.0.0.1"), 1, "--host"),
        (("tennant",), 2, "tenant"),
    ],
)
def test_failures_have_exit_codes_and_advice(
    moiety: Callable[..., Any], arguments: tuple[str, ...], status: int, message: str
) -> None:
    done = moiety(*arguments)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_help_imports_neither_torch_nor_the_web_stack() -> None:
    heavy = ("torch", "litestar", "sqlalchemy", "streamlit", "httpx", "pydantic", "moiety_engine", "moiety_demo")
    code = (
        "import sys\nfrom moiety_platform.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"sys.exit(' '.join(name for name in {heavy} if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for command in (
        "serve",
        "gateway",
        "engine",
        "dashboard",
        "migrate",
        "tenant",
        "project",
        "key",
        "class",
        "usage",
        "bench",
        "demo",
    ):
        assert f" {command} " in done.stdout


def test_a_command_offers_no_completion_of_its_own(moiety: Callable[..., Any]) -> None:
    shown = moiety("tenant", "--help").stdout
    assert "suspend" in shown
    assert "completion" not in shown


def test_the_supervisor_imports_neither_torch_nor_the_web_stack() -> None:
    heavy = ("torch", "litestar", "sqlalchemy", "streamlit", "httpx", "pydantic", "rich")
    code = f"import sys, moiety_platform.cli.serve; sys.exit(' '.join(n for n in {heavy} if n in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "streamlit.py").write_text("raise ModuleNotFoundError('No module', name='streamlit')")
    command = [sys.executable, "-m", "moiety_platform.cli", "dashboard", "--port", "1"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 1
    assert 'pip install "moiety[dashboard]"' in done.stderr


def test_a_configuration_file_sets_options_and_a_flag_beats_it(moiety: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "moiety.toml"
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [taken.getsockname()[1] for taken in (one, two)]
        config.write_text(f"[serve]\nport = {ports[0]}\nno-dashboard = true\n")
        assert f"127.0.0.1:{ports[0]}" in moiety("serve", "--config", str(config)).stderr
        assert f"127.0.0.1:{ports[1]}" in moiety("serve", "--config", str(config), "--port", str(ports[1])).stderr
    config.write_text("[serve]\nprot = 1\n")
    done = moiety("serve", "--config", str(config))
    assert done.returncode == 2
    assert "unknown settings: prot" in " ".join(done.stderr.replace("│", " ").split())


def asks(serve: Any, key: str) -> int:
    body = {"model": "moiety-demo", "messages": [{"role": "user", "content": "hello"}]}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{serve.url}/v1/chat/completions", json=body, headers=headers, timeout=DEADLINE_S).status_code


def test_limits_alert_at_percents_and_webhooks_are_made_listed_and_removed(moiety: Callable[..., Any]) -> None:
    moiety("tenant", "create", "budgeted")
    set_limits = ("quota", "set", "--tenant", "budgeted", "--tokens-per-day", "1000", "--requests-per-minute", "9")
    made = json.loads(moiety(*set_limits, "--alert-at", "80,50", "--json").stdout)["data"]
    assert {one["kind"]: one["alert_at"] for one in made} == {"requests_per_minute": [], "tokens_per_day": [50, 80]}
    assert "50, 80" in moiety("quota", "list", "--tenant", "budgeted").stdout
    for wrong in ("all", "150"):
        assert moiety(*set_limits, "--alert-at", wrong).returncode != 0
    assert moiety("quota", "set", "--tenant", "budgeted", "--tokens-per-minute", "9", "--alert-at", "5").returncode == 2
    assert "50, 80" not in moiety(*set_limits, "--alert-at", "none").stdout
    hook = moiety("webhook", "create", "https://example.com/moiety")
    assert hook.stdout.startswith("whsec_")
    assert "not shown again" in hook.stderr
    (listed,) = json.loads(moiety("webhook", "list", "--json").stdout)["data"]
    assert (listed["url"], listed["pending"], listed["dead"]) == ("https://example.com/moiety", 0, 0)
    assert "https://example.com/moiety" in moiety("webhook", "list").stdout
    assert moiety("webhook", "delete", listed["id"]).returncode == 0
    private = moiety("webhook", "create", "https://127.0.0.1/")
    assert (private.returncode, "may not go to" in private.stderr) == (1, True)


def test_a_tenant_is_erased_and_the_log_verifies(moiety: Callable[..., Any], serve: Any) -> None:
    made = json.loads(moiety("tenant", "create", "forgotten", "--json").stdout)
    key = moiety("key", "create", "app", "--tenant", "forgotten").stdout.strip()
    assert asks(serve, key) == 200
    refused = moiety("tenant", "erase", "forgotten")
    assert (refused.returncode, "--yes" in refused.stderr) == (2, True)
    done = json.loads(moiety("tenant", "erase", "forgotten", "--yes", "--json").stdout)
    assert (done["state"], done["counts"]["api_keys"]) == ("erased", 1)
    assert asks(serve, key) == 401
    assert json.loads(moiety("tenant", "show", made["id"], "--json").stdout)["name"] == f"erased-{made['id']}"
    verified = json.loads(moiety("audit", "verify", "--json").stdout)
    assert 0 < verified["erased"] < verified["entries"]
    assert "(erased)" in moiety("audit", "list").stdout
    assert "forgotten" not in moiety("audit", "list", "--json").stdout
