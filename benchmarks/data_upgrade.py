"""Upgrade of the data folder of an older `moiety serve` in place, with everything that it holds.

    python benchmarks/data_upgrade.py [--from COMMIT] [--output benchmarks/results/data_upgrade.json]

The older release is checked out from git and serves the demo model on a new folder. It gets a tenant with a key, a
quota, a price, a webhook, an adapter, completions, a batch and traces. Then it stops, and this release serves the same
folder. Every resource, the sums of usage, the audit log and the batch's results must be as before, the ledger must
reconcile, and the old key must still be answered. Contents of files and adapters, which the older release kept in SQL,
must move to the object store, and be the same afterwards. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from ending import stop_processes
from older_release import take_sources
from on_checkpoint import HERE, write_report
from safetensors.numpy import save_file

from moiety_platform.bench.environment import describe_environment
from moiety_platform.supervisor.data_dir import KEYS_FILE
from moiety_platform.supervisor.ports import claim_port

BEFORE_0_2 = "e853d1a4"  # release 0.1.0
ROOT = HERE.parent
SOURCES = ("platform", "engine", "kernels", "migrations", "dashboard")
START_S = 300.0
COMMAND_S = 300
NUM_ANSWERS = 5
NUM_LINES = 3
MODEL = "moiety-demo"
NUM_LAYERS, WIDTH = 4, 128  # of the demo model
RENAMED = {  # fields of 0.1.0
    "foresight": "speculative_prefill",
    "foreseen_tokens": "speculative_tokens",
    "foreseen_used_tokens": "speculative_used_tokens",
}
RETENTION_S = 2  # interval of the job that moves contents
IN_SQL = (  # numbers of contents that are no objects yet
    "SELECT count(*) FROM file_chunks",
    "SELECT count(*) FROM adapter_chunks",
    "SELECT count(*) FROM files WHERE object_key IS NULL",
    "SELECT count(*) FROM adapters WHERE object_key IS NULL",
)
CHANGING = ("since", "until", "last_used_at", "resets_at", "reserved")  # fields that depend on the time of the answer
LISTINGS = {
    "tenants": ("tenant", "list"),
    "classes": ("class", "list"),
    "prices": ("price", "list"),
    "webhooks": ("webhook", "list"),
    "adapters": ("adapter", "list"),
    "keys": ("key", "list", "--tenant", "acme"),
    "quotas": ("quota", "list", "--tenant", "acme"),
}

ADDED = (("route", "list"), ("guardrail", "list"))  # resources that 0.1.0 does not have
REVISIONS = ROOT / "migrations" / "moiety_migrations" / "versions"


@dataclass
class Release:
    """`moiety` from the sources in a folder, on the data folder that both releases share."""

    sources: Path
    data_dir: Path
    port: int

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(str(self.sources / part) for part in SOURCES)
        own = {
            "PYTHONPATH": path,
            "MOIETY_DATA_DIR": str(self.data_dir),
            "MOIETY_RETENTION_INTERVAL_S": str(RETENTION_S),
        }
        return os.environ | own

    @contextmanager
    def serving(self, log: Path) -> Iterator[None]:
        """Run `moiety serve` until the block ends."""
        arguments = ["serve", "--port", str(self.port), "--data-dir", str(self.data_dir), "--no-dashboard"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "moiety_platform.cli", *arguments],
                stdout=output, stderr=subprocess.STDOUT, env=self.environment,
            )  # fmt: skip
        try:
            self._wait_ready(process, log)
            yield
        finally:
            stop_processes([process], wait_s=60)

    def _wait_ready(self, process: subprocess.Popen[bytes], log: Path) -> None:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s and process.poll() is None:
            if "moiety is ready" in log.read_text(errors="replace"):
                return
            time.sleep(0.2)
        raise SystemExit(f"`moiety serve` of {self.sources} is not ready:\n{log.read_text(errors='replace')[-3000:]}")

    def run(self, *words: str) -> Any:
        """Run a command and return its decoded output. Raises SystemExit."""
        command = [sys.executable, "-m", "moiety_platform.cli", *words]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        if done.returncode:
            raise SystemExit(f"moiety {' '.join(words)} failed with {done.returncode}: {done.stdout}{done.stderr}")
        try:
            return json.loads(done.stdout)
        except json.JSONDecodeError:
            return done.stdout.strip()

    def complete(self, key: str, model: str = MODEL) -> str:
        """Return the greedy answer of a model."""
        answer = httpx.post(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            headers={"Authorization": f"Bearer {key}"},
            json={"model": model, "temperature": 0, "messages": [{"role": "user", "content": "What is 17 + 25?"}]},
            timeout=60,
        )
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])

    def contents(self) -> dict[str, Any]:
        """Return the contents of the folder, as the admin API lists them."""
        found = {name: self.run(*words, "--json") for name, words in LISTINGS.items()}
        found["usage"] = self.run("usage", "--by", "tenant,model", "--json")
        found["reconcile"] = self.run("usage", "reconcile", "--json")
        found["audit"] = self.run("audit", "verify", "--json")
        return found

    def traces(self) -> list[str]:
        """Return the ids of the stored traces, in order."""
        key = json.loads((self.data_dir / KEYS_FILE).read_text())["admin_key"]
        answer = httpx.get(
            f"http://127.0.0.1:{self.port}/admin/v1/traces", headers={"Authorization": f"Bearer {key}"}, timeout=60
        )
        answer.raise_for_status()
        return sorted(row["trace_id"] for row in answer.json()["data"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="commit", default=BEFORE_0_2, help="commit of the older release")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "data_upgrade.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moiety-data-upgrade-") as name:
        checks, sizes = _upgrade(Path(name), options.commit)
    report = {
        "date": date.today().isoformat(),
        "command": "python benchmarks/data_upgrade.py",
        "settings": {"from": options.commit},
        "environment": describe_environment(),
        "sizes": sizes,
        "checks": checks,
    }
    write_report(report, options.output)
    print(json.dumps({"sizes": sizes, "checks": checks}, indent=1))
    sys.exit(0 if all(checks.values()) else 1)


def _upgrade(folder: Path, commit: str) -> tuple[dict[str, bool], dict[str, int]]:
    data_dir, port = folder / "data", claim_port("127.0.0.1", 0, "--port")
    old = Release(take_sources(commit, folder / "sources", SOURCES), data_dir, port)
    new = Release(ROOT, data_dir, port)
    with old.serving(folder / "older.log"):
        key, batch_id = _fill(old, folder)
        answer, results = old.complete(key), old.run("batch", "results", batch_id)
        traces = _wait(old.traces, 1)  # a share of the requests is traced
        before = old.contents()
    with new.serving(folder / "newer.log"):
        new.run("audit", "verify", "--expect", before["audit"]["head"])
        after = new.contents()
        checks = {name: _holds(before[name], after[name]) for name in LISTINGS}
        checks["usage"] = _holds(before["usage"], after["usage"])
        checks["ledger_reconciles"] = bool(after["reconcile"]["agrees"])
        checks["audit_log_is_intact"] = after["audit"]["entries"] >= before["audit"]["entries"]
        checks["batch_results"] = new.run("batch", "results", batch_id) == results
        checks["traces"] = set(traces) <= set(new.traces())
        checks["old_key_is_answered"] = new.complete(key) == answer
        adapted = new.complete(key, f"{MODEL}:mine")
        checks["adapter_is_answered"] = bool(adapted)
        checks["new_resources_are_empty"] = not any(new.run(*words, "--json")["data"] for words in ADDED)
        checks["contents_are_objects"] = _moved(data_dir)
    with new.serving(folder / "again.log"):  # the adapter is read again, from the object store
        checks["batch_results_as_objects"] = new.run("batch", "results", batch_id) == results
        checks["adapter_as_object"] = new.complete(key, f"{MODEL}:mine") == adapted
        newest = max(path.name[:4] for path in REVISIONS.glob("0*.py"))
        checks["revision"] = _value(data_dir, "SELECT version_num FROM alembic_version") == newest
    sizes = {name: len(before[name]["data"]) for name in LISTINGS} | {"traces": len(traces)}
    return checks, sizes | {"objects": sum(path.is_file() for path in (data_dir / "objects").rglob("*"))}


def _moved(data_dir: Path) -> bool:
    """Return whether all contents in SQL become objects within a minute."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        if not any(_value(data_dir, statement) for statement in IN_SQL):
            return True
        time.sleep(0.5)
    return False


def _value(data_dir: Path, statement: str) -> Any:
    """Return the one value of a query of the database."""
    with closing(sqlite3.connect(f"file:{data_dir / 'moiety.db'}?mode=ro", uri=True)) as connection:
        return connection.execute(statement).fetchone()[0]


def _fill(old: Release, folder: Path) -> tuple[str, str]:
    """Create resources and usage of each kind; return the tenant's key and the id of a completed batch."""
    old.run("tenant", "create", "acme", "--class", "priority", "--weight", "2")
    key = str(old.run("key", "create", "website", "--tenant", "acme", "--json")["secret"])
    old.run("quota", "set", "--tenant", "acme", "--tokens-per-day", "2000000", "--requests-per-minute", "600")
    old.run("price", "set", MODEL, "--input", "0.15", "--output", "0.60")
    old.run("webhook", "create", "https://example.com/alerts")
    old.run("adapter", "add", "acme", MODEL, "mine", str(_write_adapter(folder / "adapter")))
    for _ in range(NUM_ANSWERS):
        old.complete(key)
    old.complete(key, f"{MODEL}:mine")
    lines = folder / "lines.jsonl"
    lines.write_text("".join(json.dumps(_batch_line(number)) + "\n" for number in range(NUM_LINES)))
    return key, str(old.run("batch", "submit", str(lines), "--wait", "--json")["id"])


def _batch_line(number: int) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"What is {number} + 5?"}], "max_tokens": 8}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}


def _write_adapter(folder: Path) -> Path:
    """Write a LoRA adapter of the demo model's query projections, of rank 4."""
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    tensors = {}
    for layer in range(NUM_LAYERS):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{module}.lora_A.weight"] = random.standard_normal((4, WIDTH), dtype=np.float32)
        factor = random.standard_normal((WIDTH, 4), dtype=np.float32) * np.float32(0.01)
        tensors[f"{module}.lora_B.weight"] = factor
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _wait(read: Callable[[], list[str]], at_least: int) -> list[str]:
    """Return what is read once it has that many items. Raises SystemExit after a minute."""
    until_s = time.monotonic() + 60
    while len(found := read()) < at_least:
        if time.monotonic() > until_s:
            raise SystemExit(f"{len(found)} of {at_least} traces are stored after a minute")
        time.sleep(0.5)
    return found


def _holds(before: Any, after: Any) -> bool:
    """Return whether `after` has every row of `before` with its values; it may have further fields."""
    if isinstance(before, dict) and isinstance(after, dict):
        return all(
            name in CHANGING or _holds(value, after.get(RENAMED.get(name, name))) for name, value in before.items()
        )
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_holds, before, after))
    return bool(before == after)


if __name__ == "__main__":
    main()
