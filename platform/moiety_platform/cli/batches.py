"""Commands `moiety batch …`: files of requests that are answered with spare capacity at half the price."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moiety_platform.cli.admin_command import AsJson, DataDir, Url, Wide
from moiety_platform.cli.errors import EXIT_FAILED, CommandError, NotReachable
from moiety_platform.cli.printing import print_line
from moiety_platform.cli.tables import show_json, show_row, show_rows
from moiety_platform.cli.tenant_client import TenantClient
from moiety_platform.resources.paths import path_of

COLUMNS = {
    "id": "id",
    "status": "status",
    "endpoint": "endpoint",
    "total": "lines",
    "completed": "answered",
    "failed": "failed",
    "created": "created",
}
DETAILS = ("endpoint", "failed")
OVER = ("completed", "failed", "expired", "cancelled")
POLL_S = 0.5
UNREACHABLE_LIMIT_S = 60.0
MAX_LIST = 100

app = typer.Typer(no_args_is_help=True, help="Submit files of requests, follow their progress and fetch the answers.")

BatchId = Annotated[str, typer.Argument(help="Id of the batch.")]
Key = Annotated[
    str | None,
    typer.Option(
        envvar="MOIETY_KEY",
        help="API key of a tenant. If not given, the tenant's key of the moiety serve that uses --data-dir.",
    ),
]
LOCAL = Path(".moiety")


@app.command("submit")
def submit(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="File of requests, one per line.")
    ],
    endpoint: Annotated[
        str | None, typer.Option(help="Endpoint of all requests. If not given, the `url` of the first request.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the batch is finished and show its progress.")
    ] = False,
    url: Url = None,
    key: Key = None,
    data_dir: DataDir = LOCAL,
    as_json: AsJson = False,
) -> None:
    """Upload a file of requests and have its lines answered.

    With --wait, ends with 1 unless the batch is completed.
    """
    path = endpoint or find_endpoint(file)
    with TenantClient.connect(url, key, data_dir) as client:
        with file.open("rb") as content:
            uploaded = client.upload(file.name, content)
        asked = {"input_file_id": uploaded["id"], "endpoint": path, "completion_window": "24h"}
        batch = client.call("POST", "/batches", json=asked)
        if wait:
            print_line(f"{batch['id']} is submitted; it continues without this command", err=True)
            batch = follow(client, batch)
    show(batch, as_json)
    if wait and batch["status"] != "completed":
        raise typer.Exit(EXIT_FAILED)


@app.command("list")
def list_batches(
    last: Annotated[int, typer.Option(min=1, max=MAX_LIST, help="Number of newest batches to show.")] = 20,
    url: Url = None,
    key: Key = None,
    data_dir: DataDir = LOCAL,
    as_json: AsJson = False,
    wide: Wide = False,
) -> None:
    """List the project's batches, newest first."""
    with TenantClient.connect(url, key, data_dir) as client:
        page = client.call("GET", "/batches", params={"limit": last})
    rows = page["data"] if as_json else [summarise(batch) for batch in page["data"]]
    show_rows(rows, COLUMNS, as_json, wide=wide, details=DETAILS)


@app.command("status")
def status(
    batch_id: BatchId, url: Url = None, key: Key = None, data_dir: DataDir = LOCAL, as_json: AsJson = False
) -> None:
    """Show the progress of a batch, and the errors of its input file."""
    with TenantClient.connect(url, key, data_dir) as client:
        show(client.call("GET", path_of("batches", batch_id)), as_json)


@app.command("cancel")
def cancel(
    batch_id: BatchId, url: Url = None, key: Key = None, data_dir: DataDir = LOCAL, as_json: AsJson = False
) -> None:
    """Cancel a batch: no more of its lines are answered; existing answers stay."""
    with TenantClient.connect(url, key, data_dir) as client:
        show(client.call("POST", path_of("batches", batch_id, "cancel")), as_json)


@app.command("results")
def results(
    batch_id: BatchId,
    output: Annotated[Path | None, typer.Option(help="File for the answers. If not given, standard output.")] = None,
    errors: Annotated[
        bool, typer.Option("--errors", help="Write the failed requests with their errors instead of the answers.")
    ] = False,
    url: Url = None,
    key: Key = None,
    data_dir: DataDir = LOCAL,
) -> None:
    """Write the answers of a batch that has ended, one per line, in input order."""
    with TenantClient.connect(url, key, data_dir) as client:
        batch = client.call("GET", path_of("batches", batch_id))
        if batch["status"] not in OVER:
            raise CommandError(f"the batch is {batch['status']}; wait for its end, or cancel it")
        file_id = batch["error_file_id" if errors else "output_file_id"]
        if file_id is None:
            kind, other = ("error", "results") if errors else ("output", "results --errors")
            raise CommandError(f"the batch has no {kind} file; see: moiety batch status, moiety batch {other}")
        with contextlib.nullcontext(sys.stdout.buffer) if output is None else output.open("wb") as file:
            for piece in client.download(file_id):
                file.write(piece)


def find_endpoint(file: Path) -> str:
    """Return the `url` of the first line that is not blank. Raises CommandError."""
    with file.open("rb") as lines:
        for line in lines:
            if line.strip():
                try:
                    return str(json.loads(line)["url"])
                except (ValueError, KeyError, TypeError) as exc:
                    raise CommandError(
                        f"the first line of {file} has no 'url'; give --endpoint, or see `moiety batch submit --help`"
                    ) from exc
    raise CommandError(f"{file} has no lines; write one request per line")


def follow(client: TenantClient, batch: dict[str, Any]) -> dict[str, Any]:
    """Poll the batch to its end and return it; with a progress bar on a terminal.

    Tolerates an unreachable gateway for UNREACHABLE_LIMIT_S. Raises NotReachable, NotAllowed or CommandError.
    """
    heard_s = time.monotonic()
    with make_progress() as progress:
        task = progress.add_task(batch["status"], total=None)
        while True:
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            progress.update(task, description=batch["status"], completed=done, total=counts["total"] or None)
            if batch["status"] in OVER:
                return batch
            time.sleep(POLL_S)
            try:
                batch = client.call("GET", path_of("batches", batch["id"]))
                heard_s = time.monotonic()
            except NotReachable:
                if time.monotonic() - heard_s > UNREACHABLE_LIMIT_S:
                    raise


def make_progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def show(batch: Mapping[str, Any], as_json: bool) -> None:
    """Show a batch and, as a table, the errors of its lines."""
    if as_json:
        show_json(batch)
        return
    files = {name: batch[name] for name in ("input_file_id", "output_file_id", "error_file_id")}
    show_row({**summarise(batch), **files}, as_json=False)
    problems = (batch["errors"] or {"data": []})["data"]
    if problems:
        show_rows(problems, {"line": "line", "code": "code", "message": "message"}, False, prose=("message",))


def summarise(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a batch for a table."""
    created = datetime.fromtimestamp(batch["created_at"], UTC).isoformat()
    return {
        **{name: batch[name] for name in ("id", "status", "endpoint")},
        **batch["request_counts"],
        "created": created,
    }
