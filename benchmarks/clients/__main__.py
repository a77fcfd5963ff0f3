"""Run every task of every client against a gateway, and print the matrix.

    make clients [ARGS="--only openai --tasks chat,tools"]

Installs the clients' packages (PyPI and npm) into separate folders, starts `moiety serve` with the demo model and a
gateway with scripted engines on loopback, and runs each client's script as a process. A cell says `pass`, `refused`
(the gateway answered 400, with its reason), `fail` (with the error) or `–` (the client has no such feature).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from clients.catalog import CLIENTS, HERE, SERVERS, TASKS, Client
from clients.environments import CannotInstall, Environments
from clients.report import Cell, Row, as_json, as_markdown
from clients.servers import Gateway, demo_gateway, scripted_gateways
from moiety_platform.bench.environment import describe_environment

CLIENT_TIMEOUT_S = 900.0  # of all tasks of one client, on a busy machine
RESULTS = HERE.parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="words separated by commas; run only clients whose names contain one"
    )
    parser.add_argument("--tasks", default=",".join(TASKS), help="tasks to run, separated by commas")
    parser.add_argument(
        "--work", type=Path, default=Path.home() / ".cache" / "moiety-clients", help="folder for the environments"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS / "clients.json",
        help="JSON file for the results; the table is written beside it as .md",
    )
    parser.add_argument("--list", action="store_true", help="list the clients and tasks")
    options = parser.parse_args()
    if options.list:
        print(
            "\n".join(["clients:", *(f"  {client.name}" for client in CLIENTS), "tasks:", *(f"  {t}" for t in TASKS)])
        )
        return
    words = [word.casefold() for word in options.only.split(",") if word]
    chosen = [client for client in CLIENTS if not words or any(word in client.name.casefold() for word in words)]
    asked = options.tasks.split(",")
    if not chosen or set(asked) - set(TASKS):
        parser.error("no such client or task; --list names them")
    environments = Environments(options.work)
    with (
        tempfile.TemporaryDirectory() as folder,
        demo_gateway(Path(folder)) as demo,
        scripted_gateways(Path(folder)) as scripted,
    ):
        rows = [run_client(client, asked, environments, (demo, *scripted)) for client in chosen]
    table = as_markdown(rows, asked, SERVERS)
    print(table)
    options.output.write_text(json.dumps(as_json(rows, describe_environment()), indent=2, ensure_ascii=False) + "\n")
    options.output.with_suffix(".md").write_text(table)
    sys.exit(any(cell.outcome == "fail" for row in rows for cell in row.cells.values()))


def run_client(client: Client, tasks: Iterable[str], environments: Environments, gateways: Iterable[Gateway]) -> Row:
    """Run the client's script with all tasks; a task that it did not reach has failed."""
    tasks = list(tasks)
    print(f"{client.name} …", file=sys.stderr, flush=True)
    try:
        command = environments.command(client)
    except CannotInstall as exc:
        return Row(client.name, "", dict.fromkeys(tasks, Cell("fail", f"not installed: {exc}")))
    servers = {task: client.server_of(task) for task in tasks}
    told = {"MOIETY_TASK_SERVERS": json.dumps(servers), **environments.variables(client)}
    for gateway in gateways:
        told |= gateway.variables()
    with tempfile.TemporaryDirectory() as home:
        found, end = _run_script([*command, *tasks], os.environ | told | {"HOME": home}, Path(home))
    cells = {task: found.get(task, Cell("fail", f"the script ended before: {end}")) for task in tasks}
    return Row(client.name, environments.version(client), cells)


def _run_script(command: list[str], environment: dict[str, str], folder: Path) -> tuple[dict[str, Cell], str]:
    """Return the cells that the script printed and the end of its error output."""
    try:
        made = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, timeout=CLIENT_TIMEOUT_S, check=False
        )
        output, errors = made.stdout, made.stderr
    except subprocess.TimeoutExpired as exc:
        output, errors = exc.stdout or b"", (exc.stderr or b"") + b"\nit took too long"
    found = {}
    for line in output.decode(errors="replace").splitlines():
        if line.startswith('{"task":'):
            said = json.loads(line)
            found[said["task"]] = Cell(said["outcome"], said["detail"])
    sys.stderr.write("".join(f"  {task}: {cell.outcome} {cell.detail}\n" for task, cell in found.items()))
    return found, errors.decode(errors="replace")[-300:].strip()


if __name__ == "__main__":
    main()
