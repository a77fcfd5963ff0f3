"""The command `moiety simulate`: parses options; prints a table or one JSON object."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moiety_engine.command_errors import exit_on_error
from moiety_engine.errors import InvalidConfig
from moiety_engine.simulator.comparison import PolicyComparison, Scenario, compare, read_classes
from moiety_engine.simulator.devices import SimulatedDevice, find_device
from moiety_engine.simulator.options import (
    ArrivalDuration,
    AsJson,
    ClassShares,
    ClassTargets,
    DeviceName,
    GeneratedArrivals,
    KvBandwidth,
    MaxOutputTokens,
    NumDecodeDevices,
    NumReplicas,
    NumTenants,
    OfferedLoad,
    PolicyNames,
    Seed,
    StepTokens,
    TraceFile,
    TraceLoadFactor,
)
from moiety_engine.simulator.plots import check_plot, draw
from moiety_engine.simulator.roles import KV_BYTES_PER_S
from moiety_engine.simulator.roles_report import print_roles, simulate_roles
from moiety_kernels.environment import describe_environment
from moiety_wire.classes import SHIPPED
from moiety_workload.errors import WorkloadError
from moiety_workload.tenants import parse_shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from moiety_wire.classes import ServiceClass


def simulate_command(
    trace: TraceFile = None,
    generate: GeneratedArrivals = None,
    device: DeviceName = "a10g-llama2-7b",
    policy: PolicyNames = None,
    compare_with: Annotated[
        str, typer.Option("--compare", help="Further policies to compare, separated by commas.")
    ] = "",
    load: OfferedLoad = None,
    times: TraceLoadFactor = 1.0,
    replicas: NumReplicas = 1,
    prefill: Annotated[int, typer.Option(min=0, help="Number of prefill devices. It requires --decode.")] = 0,
    decode: NumDecodeDevices = 0,
    kv_gb_per_s: KvBandwidth = KV_BYTES_PER_S / 1e9,
    classes: ClassShares = None,
    class_targets: ClassTargets = None,
    duration_s: ArrivalDuration = None,
    tenants: NumTenants = 20,
    weights: Annotated[
        str, typer.Option(help="Weights of tenants, such as a=1,b=2. The weight of the others is 1.")
    ] = "",
    scale: Annotated[float, typer.Option(min=0.0001, help="Factor that multiplies the lengths of the trace.")] = 1.0,
    max_output_tokens: MaxOutputTokens = None,
    max_batch_tokens: StepTokens = None,
    seed: Seed = 0,
    seeds: Annotated[
        str, typer.Option(help="Random seeds, separated by commas. The figures are means over them.")
    ] = "",
    drain: Annotated[
        bool, typer.Option(help="Continue after the last arrival until all requests have finished.")
    ] = True,
    plot: Annotated[Path | None, typer.Option(help="File for a plot of the comparison, .png or .html.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the real scheduler under virtual time, on a trace or on random arrivals."""
    names = _policy_names(policy or [], compare_with)
    with exit_on_error("moiety simulate", WorkloadError):
        if plot is not None:
            check_plot(plot)
        chosen = _device(device, max_batch_tokens)
        scenario = Scenario(
            trace=trace,
            spec=generate,
            num_tenants=tenants,
            scale=scale,
            duration_s=duration_s,
            load=load,
            times=times,
            num_replicas=replicas,
            shares=None if classes is None else parse_shares(classes),
            weights=_parse_weights(weights),
        )
        seed_list = _parse_seeds(seeds) or [seed]
        known_classes = SHIPPED if class_targets is None else read_classes(class_targets)
        if prefill or decode:
            found = simulate_roles(
                scenario,
                chosen,
                names,
                known_classes,
                seed_list[0],
                num_prefill=prefill,
                num_decode=decode,
                kv_gb_per_s=kv_gb_per_s,
            )
            _print_roles(found, scenario, chosen, as_json=as_json)
            return
        with _progress() as on_progress:
            done = compare(
                scenario,
                chosen,
                names,
                classes=known_classes,
                seeds=seed_list,
                max_tokens=max_output_tokens,
                drain=drain,
                on_progress=on_progress,
            )
        if plot is not None:
            _draw_plot(done, known_classes, f"{chosen.name}, {_describe(scenario)}", plot)
    settings = {"max_tokens": max_output_tokens, "seeds": seed_list, "drain": drain}
    _print_comparison(done, scenario, chosen, settings, as_json=as_json)


def _policy_names(policies: list[str], compare_with: str) -> list[str]:
    """Return the policies to simulate, each once: those of `--policy`, then those of `--compare`."""
    compared = filter(None, (name.strip() for name in compare_with.split(",")))
    return list(dict.fromkeys([*policies, *compared])) or ["moiety"]


def _device(name: str, max_batch_tokens: int | None) -> SimulatedDevice:
    """Return the simulated device, with another token budget if one is given."""
    device = find_device(name)
    return device if max_batch_tokens is None else msgspec.structs.replace(device, max_batch_tokens=max_batch_tokens)


def _draw_plot(done: PolicyComparison, classes: Iterable[ServiceClass], title: str, path: Path) -> None:
    """Draw the comparison, with the classes in the order of their ranks."""
    ranked = sorted(classes, key=lambda service: service.rank)
    draw(done.policies, [service.name for service in ranked], title, path)


def _print_comparison(
    done: PolicyComparison, scenario: Scenario, device: SimulatedDevice, settings: dict[str, Any], *, as_json: bool
) -> None:
    if not as_json:
        _print(done)
        return
    typer.echo(json.dumps(_report(scenario, {"device": msgspec.to_builtins(device), **settings}, done)))


def _print_roles(found: dict[str, Any], scenario: Scenario, device: SimulatedDevice, *, as_json: bool) -> None:
    if not as_json:
        print_roles(found)
        return
    settings = {**_offered(scenario), "device": msgspec.to_builtins(device)}
    typer.echo(json.dumps({"environment": describe_environment("numpy"), "settings": settings, "roles": found}))


def _offered(scenario: Scenario) -> dict[str, Any]:
    return {
        "trace": None if scenario.trace is None else scenario.trace.name,
        "generate": scenario.spec,
        "load": scenario.load,
        "times": scenario.times,
        "replicas": scenario.num_replicas,
        "classes": scenario.shares,
        "weights": scenario.weights,
        "scale": scenario.scale,
    }


def _report(scenario: Scenario, settings: dict[str, Any], done: PolicyComparison) -> dict[str, Any]:
    """Return the JSON object of `--json`."""
    offered = {**_offered(scenario), "duration_s": done.duration_s, "num_requests": done.num_requests}
    return {
        "environment": describe_environment("numpy"),
        "settings": offered | settings,
        "capacity": {"work_per_s": done.capacity.work_per_s, "offered_by_trace": done.capacity.offered},
        "policies": done.policies,
    }


@contextmanager
def _progress() -> Iterator[Callable[[str, int, float, int], None] | None]:
    """Show a progress bar per run on a terminal; yield None in a pipe."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[tuple[str, int], Any] = {}

        def show(policy: str, seed: int, fraction: float, num_open: int) -> None:
            if (policy, seed) not in tasks:
                tasks[policy, seed] = progress.add_task(f"{policy}, seed {seed}", total=1.0, note="")
            progress.update(tasks[policy, seed], completed=fraction, note=f"{num_open} open")

        yield show


def _print(done: PolicyComparison) -> None:
    console = Console()
    table = Table("policy", "class", "requests", "SLO attained", "rejected", "TTFT p50 / p90 / p99 s", "TPOT p99 ms")
    for policy, figures in done.policies.items():
        for name, row in figures["classes"].items():
            ttft, tpot = row["ttft_s"], row["tpot_s"]["p99"]
            table.add_row(
                policy,
                name,
                f"{row['num']:.0f}",
                f"{row['attainment']:.1%}",
                f"{row['num_rejected']:.0f}",
                " / ".join("–" if value is None else f"{value:.2f}" for value in ttft.values()),
                "–" if tpot is None else f"{1000 * tpot:.0f}",
            )
    console.print(table)
    table = Table(
        "policy", "goodput / C", "completed / C", "tokens/s", "gap (bound)", "Jain", "preempted", "recomputed"
    )
    for policy, figures in done.policies.items():
        fairness = figures["fairness"]
        table.add_row(
            policy,
            f"{figures['goodput_fraction_of_capacity']:.3f}",
            f"{figures['completed_fraction_of_capacity']:.3f}",
            f"{figures['throughput_tokens_per_s']:.0f}",
            f"{fairness['max_gap']:.0f} ({fairness['bound']:.0f})",
            f"{fairness['jain']:.3f}",
            f"{figures['preemptions']:.0f}",
            f"{figures['recomputed_fraction']:.2%}",
        )
    console.print(table)
    offered = next(iter(done.policies.values()))["offered_fraction_of_capacity"]
    console.print(
        f"{done.num_requests} requests in {done.duration_s:.0f} s, {offered:.2f} × the throughput of "
        f"saturated FCFS (C = {done.capacity.work_per_s:.3f} predicted device-seconds of work a second)"
    )


def _describe(scenario: Scenario) -> str:
    source = scenario.trace.stem if scenario.trace is not None else str(scenario.spec)
    return source if scenario.load is None else f"{source} at {scenario.load:g} times its capacity"


def _parse_weights(text: str) -> dict[str, float]:
    weights = {}
    for part in filter(None, text.split(",")):
        name, separator, value = part.partition("=")
        try:
            weights[name.strip()] = float(value)
        except ValueError:
            separator = ""
        if not separator or not weights[name.strip()] > 0:
            raise InvalidConfig(f"--weights {part!r} is not TENANT=WEIGHT with a weight above 0")
    return weights


def _parse_seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in filter(None, text.split(","))]
    except ValueError as exc:
        raise InvalidConfig(f"--seeds {text!r} must be whole numbers separated by commas") from exc
