"""`moiety backup` of a serve that answers requests, and `moiety restore` to another that continues."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conftest import wait_for

DEADLINE_S = 60
BODY = {"model": "moiety-demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def ask(url: str, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/chat/completions", json=BODY, headers=headers, timeout=DEADLINE_S).status_code


def num_rows(file: Path) -> int:
    with closing(sqlite3.connect(file)) as store:
        return int(store.execute("SELECT count(*) FROM usage").fetchone()[0])


@pytest.fixture
def moiety(called: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    for name in [name for name in os.environ if name.startswith("MOIETY_")]:
        monkeypatch.delenv(name)
    return called


def test_a_serve_is_backed_up_while_requests_run_and_restored_to_another(
    start_serve: Callable[..., Any], moiety: Callable[..., Any], tmp_path: Path
) -> None:
    serve = start_serve("--no-dashboard", "--no-traces")
    url = serve.url
    first = partial(moiety, MOIETY_DATA_DIR=str(serve.data_dir))
    keys = []
    for tenant in ("acme", "globex"):
        first("tenant", "create", tenant)
        keys.append(first("key", "create", "ci", "--tenant", tenant).stdout.strip())
    first("quota", "set", "--tenant", "acme", "--tokens-per-day", "1000000")
    line = {"method": "POST", "url": "/v1/chat/completions", "body": BODY}
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"custom_id": f"n{n}", **line}) + "\n" for n in range(10)))
    batch = json.loads(first("batch", "submit", str(file), "--wait", "--key", keys[0], "--json").stdout)
    answers = first("batch", "results", batch["id"], "--key", keys[0]).stdout
    assert len(answers.splitlines()) == 10

    done = threading.Event()
    statuses: list[int] = []

    def keep_asking() -> None:
        while not done.is_set():
            statuses.append(ask(url, keys[len(statuses) % 2]))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        wait_for(lambda: len(statuses) > 3, "requests beside the backup")
        before = num_rows(serve.data_dir / "moiety.db")
        backup = tmp_path / "backups" / "monday"
        made = first("backup", "--output", str(backup), "--json")
        after = len(statuses)
        wait_for(lambda: len(statuses) > after + 3, "requests after the backup")
    finally:
        done.set()
        asking.join()
    assert made.returncode == 0, made.stderr
    assert set(statuses) == {200}
    num_objects = json.loads(made.stdout)["objects"]
    assert num_objects in (1, 2)  # the batch's input, and its answers once they have moved out of the database
    head = json.loads(first("audit", "verify", "--json").stdout)["head"]
    assert serve.stop() == 0

    checked = moiety("restore", str(backup), "--check")
    assert (checked.returncode, "sqlite, revision" in checked.stdout) == (0, True)
    target = tmp_path / "second"
    second = partial(moiety, MOIETY_DATA_DIR=str(target))
    restored = second("restore", str(backup), "--json")
    assert restored.returncode == 0, restored.stderr
    report = json.loads(restored.stdout)
    assert (report["problems"], report["objects"], report["audit_head"]) == ([], num_objects, head)
    assert before <= report["requests"] <= num_rows(serve.data_dir / "moiety.db")
    again = second("restore", str(backup))
    assert (again.returncode, "the target is not empty" in again.stderr) == (1, True)

    continued = start_serve("--no-dashboard", "--no-traces", data_dir=target)
    assert [ask(continued.url, key) for key in keys] == [200, 200]
    wait_for(lambda: num_rows(target / "moiety.db") >= report["requests"] + 2, "the rows of the new requests")
    assert second("usage", "reconcile").returncode == 0
    assert second("audit", "verify", "--expect", head).returncode == 0
    assert second("batch", "results", batch["id"], "--key", keys[0]).stdout == answers
    busy = second("restore", str(backup), "--overwrite")
    assert (busy.returncode, "is in use by another moiety serve" in busy.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("backup", "--output", "{tmp}/new", "--data-dir", "{tmp}/none"), "there is no database"),
        (("backup", "--output", "{tmp}/new", "--database-url", "mysql://x/y"), "not a supported database URL"),
        (("restore", "{tmp}", "--data-dir", "{tmp}/none"), "is no complete backup"),
    ],
)
def test_what_cannot_be_done_is_told_with_advice(
    moiety: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = moiety(*(one.format(tmp=tmp_path) for one in arguments))
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "new").exists()
