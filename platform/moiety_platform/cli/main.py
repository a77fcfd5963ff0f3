"""Root of the `moiety` command, and the only place that turns its errors into exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from importlib.metadata import version as package_version
from typing import Annotated

import typer
from typer.core import TyperGroup

from moiety_platform.administration.catalog import RESOURCES
from moiety_platform.cli.config_file import with_file
from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.lazy import Target, add_lazy_commands, explain_missing_package, load_target
from moiety_platform.cli.printing import print_line, print_prose
from moiety_platform.resources.declaration import Resource

COMMANDS: dict[str, tuple[Target, str]] = {
    "serve": ("moiety_platform.cli.serve:serve", "Serve a model to tenants with keys: engine, gateway and dashboard."),
    "gateway": ("moiety_platform.cli.gateway:gateway", "Run the HTTP gateway alone."),
    "traces": ("moiety_platform.cli.traces:traces", "Run the trace store alone."),
    "migrate": (
        "moiety_platform.cli.migrate:migrate",
        "Migrate the database, or show its revision.",
    ),
    "backup": (
        "moiety_platform.cli.backup:backup",
        "Back up the database, the pepper and stored files, while the gateways serve.",
    ),
    "restore": ("moiety_platform.cli.backup:restore", "Restore a backup to empty stores, and verify the result."),
    "cluster": ("moiety_platform.cli.cluster:app", "Create the Secrets and the owner's key of a Helm release."),
    "audit": ("moiety_platform.cli.audit:app", "Show the log of administrative changes, and verify it."),
    "batch": ("moiety_platform.cli.batches:app", "Submit files of requests, follow their progress, fetch the answers."),
    "support-bundle": (
        "moiety_platform.cli.support_bundle:support_bundle",
        "Collect diagnostic data for support in one file, without secrets.",
    ),
    "curve-keygen": (
        "moiety_platform.cli.curve_keygen:curve_keygen",
        "Create a CURVE key pair for an engine or a gateway.",
    ),
    "config": ("moiety_platform.cli.config:app", "Check a configuration file, and show the settings of a gateway."),
    "doctor": ("moiety_platform.cli.doctor.command:doctor", "Find problems of a deployment, and suggest remedies."),
    "apply": (
        "moiety_platform.cli.apply.command:apply",
        "Apply a file that declares tenants, classes and quotas (declarative configuration).",
    ),
    "controller": (
        "moiety_platform.cli.controller.command:controller",
        "Apply custom resources of Kubernetes: Tenants, ApiKeys and Limits.",
    ),
    "endpoint-picker": (
        "moiety_platform.cli.endpoint_picker:endpoint_picker",
        "Choose a gateway for each request of an Envoy proxy (Gateway API Inference Extension).",
    ),
    "contract": ("moiety_platform.cli.contracts:app", "Check whether a new tenant's limits and class can be served."),
    "verify-receipt": (
        "moiety_platform.cli.receipts:verify_receipt",
        "Verify signed receipts of requests, and recompute their answers.",
    ),
    "engines": (
        "moiety_platform.cli.engines:app",
        "List engines, let them sleep or wake, and change their expert ranks.",
    ),
    "top": ("moiety_platform.cli.top.command:top", "Watch engines, classes and tenants in the terminal."),
    "usage": ("moiety_platform.cli.usage:app", "Show usage by tenant, model or hour, and reconcile it."),
    "requests": ("moiety_platform.cli.requests:app", "Search in the log of all requests."),
}
RESOURCE_COMMANDS = "moiety_platform.cli.resource_commands:app_of"
WITH_FILE = ("engine", "dashboard")  # commands of other packages, which do not read files
SUMMARIES = {
    "engine": "Run one engine (a model replica) alone.",
    "dashboard": "Run the dashboard alone.",
    "simulate": "Run the real scheduler under virtual time, on a trace or on random arrivals.",
    "advise": "Recommend settings and a number of replicas for a load.",
    "models": "List the model families, or say whether a checkpoint would be served, and with which memory.",
    "plan": "Compute memory, speed and cost of a model on GPUs by layout, and recommend one.",
    "kernels": "Report the resources of the GPU kernels, and tune them for this GPU.",
    "precompile": "Compile the CPU kernels that a model needs, so that the first start of its engine is short.",
    "quantize": "Write a checkpoint with weights of 8 or 4 bits, and measure its quality.",
    "demo": "Train and evaluate the bundled demo model, or print examples of its tasks.",
}
ORDER = [
    "serve",
    "gateway",
    "engine",
    "dashboard",
    "traces",
    "migrate",
    *(one.name for one in RESOURCES),
    "apply",
    "audit",
    "usage",
    "requests",
    "contract",
    "verify-receipt",
    "engines",
    "top",
    "config",
    "doctor",
    "support-bundle",
    "backup",
    "restore",
    "batch",
    "curve-keygen",
    "cluster",
    "controller",
    "endpoint-picker",
    "bench",
    "simulate",
    "advise",
    "models",
    "plan",
    "quantize",
    "kernels",
    "precompile",
    "demo",
]
BENCHES = {
    "serve": ("moiety_platform.cli.bench:serve", "Measure a running gateway under open-loop load."),
    "gateway": ("moiety_platform.cli.bench_gateway:gateway", "Measure the gateway alone, on one core."),
}
BATCH_SUMMARIES = {"run": "Answer a file of requests without a server, by an engine in this process."}
BENCH_SUMMARIES = {
    "engine": "Measure the engine's throughput, offline and in this process.",
    "scheduler": "Measure the time of a scheduling decision with very many waiting requests.",
    "kernels": "Compare the kernels with other implementations and the device's roofline.",
}


def show_version(value: bool) -> None:
    if value:
        print_line(f"moiety {package_version('moiety')}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve mixture-of-experts language models to many tenants, with a fair share for each."""


def bench() -> None:
    """Measure the engine, or a running gateway."""


def build() -> TyperGroup:
    """Build the whole command; subcommands are not imported yet."""
    points = entry_points()
    group = make_group("moiety", root)
    batches = partial(
        add_lazy_commands, own={}, points=points.select(group="moiety.batch_commands"), summaries=BATCH_SUMMARIES
    )
    commands = points.select(group="moiety.commands")
    resources = {one.name: (partial(_load_resource, one), one.help) for one in RESOURCES if one.commands}
    add_lazy_commands(
        group, COMMANDS | resources, commands, SUMMARIES, {"batch": batches}, dict.fromkeys(WITH_FILE, with_file)
    )
    benches = make_group("bench", bench)
    add_lazy_commands(benches, BENCHES, points.select(group="moiety.bench_commands"), BENCH_SUMMARIES)
    group.add_command(benches)
    group.commands = {name: group.commands[name] for name in sorted(group.commands, key=place_in_help)}
    return group


def _load_resource(resource: Resource) -> typer.Typer:
    app: typer.Typer = load_target(RESOURCE_COMMANDS)(resource)
    return app


def place_in_help(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)


def make_group(name: str, callback: Callable[..., None]) -> TyperGroup:
    app = typer.Typer(name=name, no_args_is_help=True, add_completion=False)
    app.callback()(callback)
    return typer.main.get_group(app)


def main(argv: list[str] | None = None) -> None:
    """Run the command. Exit codes are those of `moiety_platform.cli.errors`."""
    try:
        build().main(args=argv, prog_name="moiety")
    except CommandError as exc:
        print_prose(f"moiety: {exc}")
        sys.exit(exc.exit_code)
    except ModuleNotFoundError as exc:
        explained = explain_missing_package(exc)
        if explained is None:
            raise
        print_prose(f"moiety: {explained}")
        sys.exit(explained.exit_code)
