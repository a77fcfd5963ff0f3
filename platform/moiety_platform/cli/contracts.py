"""Command `moiety contract check`: whether a new tenant fits, by simulation of recent traffic."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.printing import print_line, print_prose
from moiety_platform.cli.tables import show_json
from moiety_platform.contracts.arrivals import (
    BURST_FACTOR,
    MAX_REQUESTS,
    OUTPUT_WEIGHT,
    Arrival,
    ContractTerms,
    burst_of,
    busiest_window,
    contract_arrivals,
)
from moiety_platform.contracts.check import ContractCheck, ContractReport, ContractRun, Verdict
from moiety_platform.contracts.errors import ContractProblem
from moiety_platform.contracts.simulator import ContractSimulator
from moiety_platform.contracts.traffic import busiest_hours
from moiety_platform.simulations.learned_device import LIMITS, device_fields
from moiety_wire.classes import ServiceClass
from moiety_wire.engine_load import StepCosts
from moiety_workload.simulations import DEVICES

REFUSED_STATUS = 1

app = typer.Typer(help="Check whether a new tenant's limits and class can be served.")


@app.callback()
def contract() -> None:
    """Check whether a new tenant's limits and class can be served."""


@app.command("check")
@admin_command
def check(
    admin: Admin,
    requests_per_minute: Annotated[float, typer.Option(min=0.001, help="Requests per minute of the new tenant.")],
    service_class: Annotated[str, typer.Option("--class", help="Service class of the new tenant.")] = "standard",
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Limit of the new tenant's tokens per minute, prompt and output together.")
    ] = None,
    input_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Prompt tokens of each request. If not given, the lengths of the recent traffic."),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Output tokens of each request. If not given, the lengths of the recent traffic."),
    ] = None,
    weight: Annotated[float, typer.Option(min=0.001, max=1000, help="Weight of the new tenant.")] = 1.0,
    model: Annotated[str | None, typer.Option(help="Model of the recent traffic. If not given, all models.")] = None,
    hours: Annotated[float, typer.Option(min=0.01, max=744, help="Length of the recent traffic, in hours.")] = 168,
    window_s: Annotated[
        float,
        typer.Option(
            min=60, max=36_000, help="Length of the busiest part of the traffic, which is simulated, in seconds."
        ),
    ] = 1800,
    device: Annotated[
        str | None,
        typer.Option(help="Simulated device: a preset or a file. If not given, the step times of a running engine."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Replicas that serve the traffic. If not given, the healthy engines.")
    ] = None,
    max_replicas: Annotated[int, typer.Option(min=1, max=1000, help="Largest number of replicas to try.")] = 16,
    required: Annotated[float, typer.Option(min=0, max=1, help="SLO attainment to reach.")] = 0.99,
    burst_factor: Annotated[
        float,
        typer.Option(
            min=1,
            max=10,
            help="Requests of a further run, as a multiple of the recent ones, if the tenant is accepted.",
        ),
    ] = BURST_FACTOR,
    seed: Annotated[int, typer.Option(help="Random seed of the new tenant's arrivals.")] = 0,
) -> None:
    """Simulate a new tenant at its limits on the busiest part of the recent traffic, with the real scheduler.

    Ends with 1 if the tenant cannot be served as it is.
    """
    terms = ContractTerms(service_class, requests_per_minute, tokens_per_minute, input_tokens, output_tokens, weight)
    classes = {row["name"]: service_of(row) for row in admin.client.get("/classes")["data"]}
    engines = [one for one in admin.client.get("/engines")["data"] if one["healthy"] and serves(one, model)]
    try:
        _, recent = busiest_window(recent_arrivals(admin.client, hours, window_s, model, classes), window_s)
        own = contract_arrivals(terms, recent, window_s, seed)
        with tempfile.TemporaryDirectory(prefix="moiety-contract-") as name:
            folder = Path(name)
            simulator = ContractSimulator(folder, device or learned_device(engines, folder), weight)
            burst = partial(burst_of, recent, burst_factor, window_s, seed)
            checking = ContractCheck(terms, recent, own, classes, simulator, required=required, make_burst=burst)
            num_replicas = replicas or max(1, len(engines))
            report = asyncio.run(checking.run(num_replicas, max(num_replicas, max_replicas)))
    except ContractProblem as exc:
        raise CommandError(str(exc)) from exc
    if admin.as_json:
        show_json({**msgspec.to_builtins(report), "requests": len(recent), "contract_requests": len(own)})
    else:
        show_report(report, terms, len(recent), len(own), burst_factor)
    if report.verdict is not Verdict.ACCEPTED:
        raise typer.Exit(REFUSED_STATUS)


def recent_arrivals(
    client: AdminClient, hours: float, window_s: float, model: str | None, classes: Mapping[str, ServiceClass]
) -> list[Arrival]:
    """Return the served requests, in classes that still exist, of the last hours' busiest ones.

    These are the clock hours that a window of `window_s` can touch. Raises ContractProblem for too many requests.
    """
    first = datetime.now(UTC) - timedelta(hours=hours)
    busiest = busiest_hours(hourly_work(client, first, model), window_s)
    if busiest is None:
        return []
    since, until = max(busiest[0], first), busiest[1]
    found: list[Arrival] = []
    for row in client.pages("/usage/requests", since=since.isoformat(), until=until.isoformat(), model=model):
        if row["prompt_tokens"] and row["output_tokens"] and row["service_class"] in classes:
            at_s = (datetime.fromisoformat(row["started_at"]) - since).total_seconds()
            lengths = row["prompt_tokens"], row["output_tokens"]
            found.append(Arrival(at_s, row["tenant_id"], *lengths, row["service_class"]))
        if len(found) > MAX_REQUESTS:
            raise ContractProblem(
                f"more than {MAX_REQUESTS:,} requests in the busiest hours; give a --model, other --hours, or a "
                "shorter --window-s"
            )
    return found


def hourly_work(client: AdminClient, since: datetime, model: str | None) -> dict[datetime, int]:
    """Return the work of all requests of each clock hour, in prompt tokens."""
    report = client.get("/usage", group_by="hour", since=since.isoformat(), model=model)
    return {
        datetime.fromisoformat(one["group"]["hour"]): one["totals"]["prompt_tokens"]
        + OUTPUT_WEIGHT * one["totals"]["output_tokens"]
        for one in report["data"]
    }


def service_of(row: Mapping[str, Any]) -> ServiceClass:
    """Return a class of the admin API as the scheduler's."""
    fields = {name: row[name] for name in ServiceClass.__struct_fields__ if name != "spot"}
    return msgspec.convert({**fields, "spot": row["spot_floor_percent"] is not None}, ServiceClass)


def serves(engine: Mapping[str, Any], model: str | None) -> bool:
    card = engine["card"]
    return card is not None and (model is None or card["model"] == model)


def learned_device(engines: list[dict[str, Any]], folder: Path) -> str:
    """Write a device file with the step times that an engine has learned, and return its path.

    Raises ContractProblem if there is none.
    """
    load = next((one["load"] for one in engines if one["load"] and one["load"]["step_costs"]), None)
    if load is None:
        raise ContractProblem(
            "no engine has learned its step times yet; let one serve some requests, or give --device: "
            f"{', '.join(DEVICES)}, or a file of moiety bench engine --calibrate"
        )
    costs = msgspec.convert(load["step_costs"], StepCosts)
    path = folder / "device.json"
    made = device_fields(load["engine_id"], costs, **{name: load[name] for name in LIMITS})
    path.write_text(json.dumps(made), encoding="utf-8")
    return str(path)


def show_report(
    report: ContractReport, terms: ContractTerms, num_recent: int, num_own: int, burst_factor: float
) -> None:
    """Print a report for people."""
    print_line(f"simulated {num_recent:,} recent requests and {num_own:,} of the new tenant")
    for run in report.runs:
        print_line(f"  {_run_in_words(run)}")
    if report.burst is not None:
        print_line(f"  {_run_in_words(report.burst)}, with {burst_factor:g} times the recent requests")
    match report.verdict:
        case Verdict.ACCEPTED:
            print_line(f"accepted: {report.replicas} replicas carry the tenant in {terms.service_class}")
        case Verdict.NEEDS_MORE:
            options = [] if report.replicas_needed is None else [f"{report.replicas_needed} replicas"]
            options += [f"the class {name}" for name in report.classes]
            missing, name = " or ".join(options), terms.service_class
            print_line(f"{report.replicas} replicas do not carry the tenant in {name}; it needs {missing}")
        case Verdict.REFUSED:
            print_line("refused: neither more replicas nor a lower class carry the tenant")
    if report.burst is not None and report.burst.missed:
        missed = ", ".join(report.burst.missed)
        print_prose(
            f"warning: with {burst_factor:g} times the recent requests SLOs are missed ({missed}): single hours can "
            "fall below the required attainment"
        )


def _run_in_words(run: ContractRun) -> str:
    attained = ", ".join(f"{name} {share:.1%}" for name, share in sorted(run.attainment.items())) or "alone"
    missed = f"; misses: {', '.join(run.missed)}" if run.missed else ""
    tenant = f"new tenant {run.tenant_attainment:.1%}"
    return f"{run.service_class}, {run.replicas} replicas: {tenant}; {attained}{missed}"
