"""Upgrade from an older release to this one and back, on one PostgreSQL, with streams throughout.

    python benchmarks/upgrade.py [--from COMMIT] [--rate 6] [--seconds 5] [--output benchmarks/results/upgrade.json]

The older release is checked out from git into a folder and run from there, with its own migrations, gateways and
engines. In turn: it serves alone; this release's migration runs beside it; this release's gateways and engines join,
and the older ones are stopped; the older ones return on the newer tables and this release's stop, as in a rollback; and
with nothing running the tables are downgraded too, and upgraded again. Every stream must be complete, without a missing
or repeated token, and be counted once in the sums, and both releases must verify the audit log. Exits with 1 if a check
fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import httpx
from cluster import Cluster, make_tenant
from older_release import take_sources
from on_checkpoint import HERE, write_report
from postgres import Postgres

from moiety_platform.bench.environment import describe_environment

EARLIEST = "f2b029fc"  # the earliest commit whose stored names and wire protocol are those of today
ROOT = HERE.parent
SOURCES = ("platform", "engine", "kernels", "migrations", "dashboard")
COMMAND_S = 600


class Release(Cluster):
    """Two gateways and two engines from the sources in a folder.

    They share only the database and the pepper with the other release.
    """

    def __init__(self, name: str, sources: Path, folder: Path, database_url: str, pepper: str) -> None:
        (place := folder / name).mkdir()
        path = os.pathsep.join(str(sources / part) for part in SOURCES)
        self.variables = {"PYTHONPATH": path, "MOIETY_KEY_PEPPER": pepper, "MOIETY_DATABASE_URL": database_url}
        self.objects = (folder / "objects").absolute().as_uri()  # of both releases
        super().__init__(place, database_url, 2, environment=self.variables)
        self.name, self.keys = name, folder / "keys.json"
        self.makes_keys = False  # the first owner's; the other release goes by them

    def _gateway(self, number: int) -> list[str]:
        words = [one for one in super()._gateway(number) if one != "--migrate"]  # a Job does it, once
        if number == 0:
            at = words.index("--first-keys")
            words[at : at + 2] = ["--first-keys", str(self.keys)] if self.makes_keys else []
        words[words.index("--object-store-url") + 1] = self.objects
        return words

    @property
    def admin_key(self) -> str:
        return str(json.loads(self.keys.read_text())["admin_key"])

    def run(self, *words: str) -> dict[str, Any]:
        """Run one of its commands and return its output. Raises CalledProcessError."""
        command = [sys.executable, "-m", "moiety_platform.cli", *words, "--json"]
        done = subprocess.run(
            command, env=os.environ | self.variables, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        if done.returncode:
            raise SystemExit(f"{self.name}: moiety {' '.join(words)} ended with {done.returncode}: {done.stderr}")
        return dict(json.loads(done.stdout))

    def end_all(self) -> list[int]:
        """Stop gateways first, so that engines have no requests; return their exit codes."""
        return [self.end(kind, number) for kind in ("gateway", "engine") for number in range(len(self.ports))]


@dataclass
class Stream:
    """One answer; the scripted engine repeats the prompt's own tokens."""

    expected: str
    text: str = ""
    failure: str = ""
    usage: dict[str, int] = field(default_factory=dict)


@dataclass
class Load:
    """Streams to all gateways, spread as by a Kubernetes Service."""

    key: str
    rate: float
    urls: list[str] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the processes; all of them have ended on exit."""
        stop = asyncio.Event()
        async with httpx.AsyncClient(timeout=60) as client:
            task = asyncio.create_task(self._run(client, stop))
            try:
                yield
            finally:
                stop.set()
                await task

    async def _run(self, client: httpx.AsyncClient, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            began_s = time.monotonic()
            number = 0
            while not stop.is_set():
                group.create_task(self._one(client, self.urls[number % len(self.urls)], len(self.streams)))
                number += 1
                await asyncio.sleep(max(0.0, began_s + number / self.rate - time.monotonic()))

    async def _one(self, client: httpx.AsyncClient, url: str, number: int) -> None:
        tokens = 30 + number % 40
        prompt = f"{number:06d}" * 20
        stream = Stream(prompt[:tokens])
        self.streams.append(stream)
        body = {
            "model": "scripted", "prompt": prompt, "max_tokens": tokens, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        headers = {"Authorization": f"Bearer {self.key}"}
        try:
            async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
                if answer.status_code != httpx.codes.OK:
                    stream.failure = f"{answer.status_code} {(await answer.aread())[:200]!r}"
                    return
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        _take(stream, json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            stream.failure = repr(error)


def _take(stream: Stream, chunk: dict[str, Any]) -> None:
    stream.failure = str(chunk["error"]) if "error" in chunk else stream.failure
    stream.text += "".join(choice["text"] for choice in chunk.get("choices", ()))
    stream.usage = chunk.get("usage") or stream.usage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="commit", default=EARLIEST, help="commit of the older release")
    parser.add_argument("--rate", type=float, default=6, help="streams per second")
    parser.add_argument("--seconds", type=float, default=5, help="seconds of each phase, without starts and stops")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "upgrade.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moiety-upgrade-") as name:
        folder = Path(name)
        postgres = Postgres(folder)
        try:
            checks = asyncio.run(_upgrade(folder, postgres.url, options))
        finally:
            postgres.close()
    report = {
        "date": date.today().isoformat(),
        "command": f"python benchmarks/upgrade.py --rate {options.rate:g} --seconds {options.seconds:g}",
        "settings": {"from": options.commit, "rate": options.rate, "seconds": options.seconds},
        "environment": describe_environment(),
        **checks,
    }
    write_report(report, options.output)
    print(json.dumps(report["checks"], indent=1))
    sys.exit(0 if all(report["checks"].values()) else 1)


async def _upgrade(folder: Path, database_url: str, options: argparse.Namespace) -> dict[str, Any]:
    pepper = secrets.token_hex(32)
    old = Release("older", take_sources(options.commit, folder / "sources", SOURCES), folder, database_url, pepper)
    new = Release("newer", ROOT, folder, database_url, pepper)
    old.makes_keys = True
    at_first = old.run("migrate", "upgrade")["revision"]
    try:
        await old.start_all()
        async with old.admin() as client:
            ids, key = await make_tenant(client, "acme")
        load = Load(key, options.rate, [old.url(0), old.url(1)])
        codes, phases = await _roll(old, new, load, options.seconds)
        checks = await _check(old, new, load, ids["tenant"])
        checks["everything_stops_in_order"] = set(codes) == {0}
        checks |= await _back(old, new, load, at_first, ids["tenant"])
    finally:
        old.stop()
        new.stop()
    counted = {"streams": len(load.streams), "failures": [one.failure for one in load.streams if one.failure][:5]}
    return {
        "revisions": [at_first, new.run("migrate", "current")["head"]],
        "phases": phases,
        **counted,
        "checks": checks,
    }


async def _roll(old: Release, new: Release, load: Load, seconds: float) -> tuple[list[int], dict[str, int]]:
    """Upgrade and roll back under load; return exit codes, and how many streams had begun at the end of each phase."""
    phases: dict[str, int] = {}
    both = [one.url(number) for one in (old, new) for number in range(2)]
    async with load.running():
        await asyncio.sleep(seconds)
        phases["older alone"] = len(load.streams)
        await asyncio.to_thread(new.run, "migrate", "upgrade")
        await asyncio.sleep(seconds)
        phases["older, on newer tables"] = len(load.streams)
        await new.start_all()
        load.urls[:] = both
        await asyncio.sleep(seconds)
        phases["both"] = len(load.streams)
        load.urls[:] = both[2:]
        codes = await asyncio.to_thread(old.end_all)
        await asyncio.sleep(seconds)
        phases["newer alone"] = len(load.streams)
        old.makes_keys = False
        await old.start_all()
        load.urls[:] = both
        await asyncio.sleep(seconds)
        phases["both, going back"] = len(load.streams)
        load.urls[:] = both[:2]
        await asyncio.sleep(seconds)
    phases["all"] = len(load.streams)
    return codes, phases


async def _check(old: Release, new: Release, load: Load, tenant_id: str) -> dict[str, bool]:
    for one in (old, new):
        await one.wait_settled(60)
    wanted = {
        "requests": len(load.streams),
        "prompt_tokens": sum(one.usage.get("prompt_tokens", 0) for one in load.streams),
        "output_tokens": sum(one.usage.get("completion_tokens", 0) for one in load.streams),
    }
    async with new.admin() as client:
        used = await _used(client, tenant_id, len(load.streams))
        chain = (await client.get("/audit/verification")).json()
        books = (await client.get("/usage/reconciliation")).json()
    async with old.admin() as client:
        chain_there = (await client.get("/audit/verification")).json()
    return {
        "no_stream_failed": not any(one.failure for one in load.streams),
        "every_token_once": all(one.text == one.expected for one in load.streams),
        "used_is_what_was_streamed": {name: used[name] for name in wanted} == wanted,
        "books_agree": bool(books.get("agrees")),
        "audit_log_verifies_by_both": bool(chain.get("intact")) and bool(chain_there.get("intact")),
    }


async def _used(client: httpx.AsyncClient, tenant_id: str, num_requests: int) -> dict[str, int]:
    until_s = time.monotonic() + 60
    while True:
        (row,) = (await client.get("/usage", params={"tenant_id": tenant_id})).json()["data"]
        used: dict[str, int] = row["totals"]
        if used["requests"] >= num_requests or time.monotonic() > until_s:
            return used
        await asyncio.sleep(0.5)


async def _back(old: Release, new: Release, load: Load, revision: str, tenant_id: str) -> dict[str, bool]:
    """Downgrade the tables with nothing running, serve the older release on them, and upgrade them again."""
    async with new.admin() as client:
        before = await _used(client, tenant_id, len(load.streams))
    for one in (old, new):
        one.end_all()
    new.run("migrate", "downgrade", revision)
    await old.start_all()
    load.urls[:] = [old.url(0), old.url(1)]
    earlier = len(load.streams)
    async with load.running():
        await asyncio.sleep(2)
    later = load.streams[earlier:]
    old.end_all()
    new.run("migrate", "upgrade")
    await new.start_all()
    async with new.admin() as client:
        after = await _used(client, tenant_id, len(load.streams))
    made = sum(one.usage.get("completion_tokens", 0) for one in later)
    return {
        "older_serves_after_going_back": bool(later) and all(one.text == one.expected for one in later),
        "nothing_lost_by_going_back": after["requests"] == before["requests"] + len(later)
        and after["output_tokens"] == before["output_tokens"] + made,
    }


if __name__ == "__main__":
    main()
