"""Figures of the dashboard's pages, compared with `moiety usage` and with the ledger of the same store.

    python benchmarks/dashboard_figures.py --stores sqlite [--tenants 500] [--requests 2000000]
    python benchmarks/dashboard_figures.py --stores sqlite --made /tmp/large [--postgres-url URL]

The store is made by `large_store.py`, or read from a folder where that script left it. The script of each page draws it
against a real gateway, the command runs as a process, and the ledger is added up in the database. Amounts are compared
to the nano-dollar, counts exactly; where a page shows a rounded figure, the rounded one is compared. Exits with 1 if a
figure differs. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import html
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from large.visits import Visitor  # noqa: E402 - the script's own folder
from large_store import add_options, new_store, read_senders, serving  # noqa: E402
from sqlalchemy import func, select  # noqa: E402

from moiety_dashboard.formatting import dollars  # noqa: E402
from moiety_dashboard.views.spend import MONTH, days_of  # noqa: E402
from moiety_dashboard.views.windows import DAY, LONG, Window  # noqa: E402
from moiety_platform.bench.environment import describe_environment  # noqa: E402
from moiety_platform.db.session import Database  # noqa: E402
from moiety_platform.usage.models import EntryKind, LedgerEntry  # noqa: E402

NANO = 10**9
TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens")
GROUPINGS = ("tenant", "project", "key", "model", "service_class")
Figures = dict[str, dict[str, int]]  # by group, by name


@dataclass(frozen=True)
class Books:
    """The three sources: the pages, the command, and the ledger."""

    visitor: Visitor
    command: Callable[..., Any]
    database_url: str
    tenant_id: str

    def look(self, path: str, widgets: Mapping[str, Any], address: str = "") -> Any:
        """Draw a page; return it."""
        self.visitor.look((path, dict(widgets), address))
        return self.visitor.page

    def ledger(self, since: datetime, until: datetime) -> Figures:
        """Return what the ledger bills each tenant in the time."""
        return asyncio.run(_sum_ledger(self.database_url, since, until))


async def _sum_ledger(url: str, since: datetime, until: datetime) -> Figures:
    database = Database.open(url)
    of_credits = LedgerEntry.kind == EntryKind.CREDITED
    sums = {name: func.sum(getattr(LedgerEntry, name)) for name in (*TOKENS, "cost_nanodollars")}
    credit = func.coalesce(func.sum(LedgerEntry.cost_nanodollars).filter(of_credits), 0)
    statement = (
        select(LedgerEntry.tenant_id, *sums.values(), credit)
        .where(LedgerEntry.started_at >= since, LedgerEntry.started_at < until)
        .group_by(LedgerEntry.tenant_id)
    )
    try:
        async with database.read() as session:
            rows = (await session.execute(statement)).all()
    finally:
        await database.close()
    names = (*TOKENS, "cost_nanodollars")
    return {
        tenant: {**dict(zip(names, map(int, amounts), strict=True)), "credit_nanodollars": -int(credited)}
        for tenant, *amounts, credited in rows
    }


def compare(found: Mapping[str, Figures]) -> dict[str, Any]:
    """Return how many figures of the sources are the same, and those that differ; without a group it is 0."""
    names = {name for of in found.values() for figures in of.values() for name in figures}
    groups = {group for of in found.values() for group in of}
    shared = [name for name in sorted(names) if all(_has(of, name) for of in found.values())]
    differ = [
        {"group": group, "figure": name, **values}
        for group in sorted(groups)
        for name in shared
        if len(set((values := {source: of.get(group, {}).get(name, 0) for source, of in found.items()}).values())) > 1
    ]
    return {
        "sources": list(found), "figures": shared, "groups": len(groups), "compared": len(shared) * len(groups),
        "differences": differ[:20],
    }  # fmt: skip


def _has(of: Figures, name: str) -> bool:
    return any(name in figures for figures in of.values())


def shown(frame: Any, key: str) -> Figures:
    """Return a table of a page by its column `key`; amounts of dollars become nano-dollars."""
    columns = {
        "requests": "requests", "rejected": "rejected", "failed": "failed", **{name: name for name in TOKENS},
        "cost": "cost_nanodollars", "credit": "credit_nanodollars", "before_credits": "cost_before_credits_nanodollars",
    }  # fmt: skip
    return {
        str(row[key]): {
            name: round(row[column] * (NANO if "nanodollars" in name else 1) if row[column] == row[column] else 0)
            for column, name in columns.items()
            if column in frame.columns
        }
        for _, row in frame.iterrows()
    }


def told(groups: list[dict[str, Any]], key: str) -> Figures:
    """Return groups of the command's JSON by the field `key`."""
    return {
        str(one["group"][key]): {name: int(value) for name, value in one["totals"].items() if isinstance(value, int)}
        for one in groups
    }


def named(of: Figures, names: Mapping[str, str]) -> Figures:
    return {names.get(group, group): figures for group, figures in of.items()}


def check_spend(books: Books, names: Mapping[str, str]) -> dict[str, Any]:
    """Compare the page of spend, of this month by each grouping."""
    since, until = days_of(MONTH, datetime.now(UTC))
    period = ("--from", since.isoformat(), "--to", until.isoformat())
    checks: dict[str, Any] = {}
    for grouping in GROUPINGS:
        page = books.look("spend", {"spend time": MONTH, "spend by": grouping, "spend tenant": None})
        report = books.command("spend", "--by", grouping, *period)
        key = f"{grouping}_id" if grouping in ("tenant", "project", "key") else grouping
        found = {"page": shown(page.dataframe[0].value, "name"), "command": named(told(report["data"], key), names)}
        if grouping == "tenant":
            found["ledger"] = named(books.ledger(since, until), names)
            total = sum(one["cost_nanodollars"] for one in found["ledger"].values())
            tile = html.unescape(next(one.value for one in page.metric if one.label == "Spent this month"))
            checks["spend, figure of the month"] = {
                "page": tile, "command": dollars(report["total"]["cost_nanodollars"]), "ledger": dollars(total),
            }  # fmt: skip
        checks[f"spend by {grouping}, this month"] = compare(found)
    page = books.look("spend", {"spend time": MONTH, "spend by": "end_user", "spend tenant": books.tenant_id})
    report = books.command("spend", "--by", "end_user", "--tenant", books.tenant_id, *period)
    of_page = shown(page.dataframe[0].value.fillna({"name": "None"}), "name")
    checks["spend of one tenant by end user"] = compare({"page": of_page, "command": told(report["data"], "end_user")})
    return checks


def check_usage(books: Books, names: Mapping[str, str]) -> dict[str, Any]:
    """Compare the page of tenants, for each of its times."""
    return {f"tenants, {window.label}": _check_window(books, names, window) for window in LONG}


def _check_window(books: Books, names: Mapping[str, str], window: Window) -> dict[str, Any]:
    span = window.span()
    period = ("--from", span.since.isoformat(), "--to", span.until.isoformat())
    page = books.look("tenants", {"long": window.label})
    report = books.command("--by", "tenant", *period)
    found = {
        "page": shown(page.dataframe[0].value, "tenant"),
        "command": named(told(report["data"], "tenant_id"), names),
        "ledger": named(books.ledger(span.since, span.until), names),
    }
    return compare(found)


def check_credits(books: Books) -> dict[str, Any]:
    """Compare the credits of the last day on the page of classes and on that of a tenant."""
    checks = {}
    for title, address, path in (("all tenants", "", "classes"), ("one tenant", "tenant", "tenants")):
        page = books.look(path, {"part": "Usage", "long": "24 h"}, address)
        now = datetime.now(UTC)
        only = ("--tenant", books.tenant_id) if address else ()
        report = books.command("quotes", "--hours", "24", *only)
        frames = [one.value for one in page.dataframe if "met" in one.value.columns]
        of_page = sum(round(value * NANO) for value in frames[0]["credit"]) if frames else 0
        ledger = books.ledger(now - DAY, now)
        billed = [one["credit_nanodollars"] for who, one in ledger.items() if not address or who == books.tenant_id]
        sources = {"page": of_page, "command": sum(one["credit_nanodollars"] for one in report["data"])}
        of_all = {source: {"all": {"credit_nanodollars": amount}} for source, amount in sources.items()}
        checks[f"credits of {title}, 24 h"] = compare(
            {**of_all, "ledger": {"all": {"credit_nanodollars": sum(billed)}}}
        )
    return checks


def check(data_dir: Path, url: str | None) -> dict[str, Any]:
    """Return the comparisons of a store."""
    senders = read_senders(data_dir)
    with serving(data_dir, url) as (gateway, _, admin_key):
        environment = os.environ | {"MOIETY_URL": gateway, "MOIETY_ADMIN_KEY": admin_key, "TZ": "UTC"}

        def command(*words: str) -> Any:
            asked = [sys.executable, "-m", "moiety_platform.cli", "usage", *words, "--json"]
            return json.loads(subprocess.run(asked, check=True, capture_output=True, text=True, env=environment).stdout)

        database_url = url or f"sqlite:///{data_dir / 'moiety.db'}"
        books = Books(Visitor(gateway, admin_key, senders[0].tenant_id), command, database_url, senders[0].tenant_id)
        books.look("overview", {})  # which reads the names
        books.look("quotas", {})
        names: dict[str, str] = books.visitor.page.session_state["names"][1]
        return {**check_spend(books, names), **check_usage(books, names), **check_credits(books)}


def differs(one: Mapping[str, Any]) -> bool:
    return bool(one["differences"]) if "differences" in one else len(set(one.values())) > 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", default="sqlite,postgres")
    parser.add_argument("--folder", type=Path, help="folder for the stores, which are deleted afterwards")
    parser.add_argument("--made", type=Path, help="data folder of an existing store, which is kept")
    parser.add_argument("--postgres-url", help="database of the existing store, if it is PostgreSQL")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "dashboard_figures.json")
    add_options(parser)
    options = parser.parse_args()
    stores: dict[str, Any] = {}
    for name in options.stores.split(","):
        with contextlib.ExitStack() as stack:
            data_dir, url = options.made, options.postgres_url
            if data_dir is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
                folder.chmod(0o755)  # PostgreSQL runs as a user of its own
                data_dir, url, _ = stack.enter_context(new_store(name, folder, options))
            checks = check(data_dir, url)
        stores[name] = {"all_equal": not any(map(differs, checks.values())), "checks": checks}
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python benchmarks/dashboard_figures.py --stores {options.stores}",
        "environment": describe_environment(),
        "stores": stores,
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    wrong = {name: [title for title, one in store["checks"].items() if differs(one)] for name, store in stores.items()}
    print(json.dumps(wrong))
    sys.exit(1 if any(wrong.values()) else 0)


if __name__ == "__main__":
    main()
