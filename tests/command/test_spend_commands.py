"""The commands of spend and of the request log, against a real gateway."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import typer
from msgspec import to_builtins
from tests.conftest import wait_for

from moiety_platform.cli import usage
from moiety_platform.usage.schemas import UsageTotals

from .answering_gateway import answering_gateway

DEADLINE_S = 60
CARD = "4111 1111 1111 1111"


@pytest.mark.parametrize("command", [[], ["spend"]], ids=["usage", "spend"])
@pytest.mark.parametrize("options", [[], ["--csv"]], ids=["table", "csv"])
@pytest.mark.parametrize(("by", "listed"), [("end_user", "the most output tokens"), ("day,end_user", "1 first ones")])
def test_a_report_that_lists_some_groups_only_says_so(
    capsys: pytest.CaptureFixture[str], command: list[str], options: list[str], by: str, listed: str
) -> None:
    totals = to_builtins(UsageTotals(*[1] * len(UsageTotals.__struct_fields__)))
    totals["cost_before_credits_nanodollars"] = 2
    report = {"data": [{"group": {"end_user": "ada"}, "totals": totals}], "total": totals, "truncated": True}
    for truncated in (True, False):
        report["truncated"] = truncated
        with answering_gateway(lambda _: (200, report)) as gateway:
            given = [*command, "--by", by, *options, *gateway.options]
            typer.main.get_command(usage.app).main(given, standalone_mode=False)
        said = capsys.readouterr()
        assert "ada" in said.out and (listed in said.err) is truncated


def ask(serve: Any, key: str, text: str, model: str = "moiety-demo") -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{serve.url}/v1/chat/completions", json=body, headers=headers, timeout=DEADLINE_S)


def test_costs_and_requests_of_a_tenant_are_shown_and_its_contents_to_its_own_administrator(
    moiety: Callable[..., Any], serve: Any
) -> None:
    moiety("price", "set", "moiety-demo", "--input", "1", "--output", "2")
    moiety("tenant", "create", "acme")
    moiety("quota", "set", "--tenant", "acme", "--dollars-per-month", "0.01")
    key = moiety("key", "create", "ci", "--tenant", "acme").stdout.strip()
    boss = moiety("key", "create", "boss", "--tenant", "acme", "--role", "tenant-admin").stdout.strip()
    on = json.loads(moiety("requests", "log-content", "acme", "--keep-days", "2", "--json", "--admin-key", boss).stdout)
    assert (on["is_on"], on["keep_days"]) == (True, 2)
    wait_for(lambda: ask(serve, key, f"pay with {CARD}").status_code == 200, "an answer")
    assert ask(serve, key, "hello", "another").status_code == 404

    def totals(*command: str) -> dict[str, Any]:
        report = json.loads(moiety("usage", *command, "--tenant", "acme", "--json").stdout)
        return report["data"][0]["totals"] if report["data"] else {"requests": 0}

    wait_for(lambda: totals()["requests"] >= 2, "the rows, which are written with others")
    cost = totals()["cost_nanodollars"]
    assert totals("spend")["cost_nanodollars"] == cost > 0
    by_day = moiety("usage", "spend", "--tenant", "acme", "--by", "day", "--csv").stdout
    rows = list(csv.DictReader(by_day.splitlines()))
    assert sum(int(row["cost_nanodollars"]) for row in rows) == cost
    assert "total" in moiety("usage", "spend").stdout
    month = json.loads(moiety("usage", "forecast", "--tenant", "acme", "--json").stdout)
    assert month["forecast_nanodollars"] >= month["spent_nanodollars"] == cost
    assert "forecast $" in moiety("usage", "forecast").stdout
    (budget,) = json.loads(moiety("usage", "budgets", "--json").stdout)["data"]
    assert (budget["cap_nanodollars"], budget["spent_nanodollars"]) == (10**7, cost)
    assert "acme" in moiety("usage", "budgets").stdout
    served = json.loads(moiety("requests", "--tenant", "acme", "--status", "2xx", "--json").stdout)["data"]
    (missing,) = json.loads(moiety("requests", "--status", "404", "--last", "1", "--json").stdout)["data"]
    assert (missing["outcome"], missing["error_code"]) == ("rejected", "model_not_found")
    shown = json.loads(moiety("requests", "show", served[0]["request_id"], "--json").stdout)
    assert shown["request_id"] == served[0]["request_id"] and shown["cost_nanodollars"] > 0
    assert served[0]["request_id"] in moiety("requests", "--tenant", "acme").stdout
    assert moiety("requests", "show", "nobody").returncode == 1

    def content(*options: str) -> Any:
        return moiety("requests", "content", served[-1]["request_id"], *options)

    wait_for(lambda: content("--admin-key", boss).returncode == 0, "the content, which is written with others")
    assert "pay with [redacted: card numbers]" in content("--admin-key", boss).stdout
    refused = content()
    assert refused.returncode != 0 and "tenant-admin" in refused.stderr, "an owner of the deployment does not read it"
    assert moiety("requests", "log-content", "acme", "--off", "--admin-key", boss).returncode == 0
    assert not json.loads(moiety("requests", "log-content", "acme", "--json").stdout)["is_on"]
