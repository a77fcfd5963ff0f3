"""Command `moiety doctor`: options, the checks in order, and their findings."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import typer

from moiety_platform.cli.deployment_options import DeploymentOptions
from moiety_platform.cli.doctor.engines import Settings as EngineSettings
from moiety_platform.cli.doctor.engines import check_engines, local_engine
from moiety_platform.cli.doctor.finding import Finding, Severity
from moiety_platform.cli.doctor.machine import check_machine, versions
from moiety_platform.cli.doctor.running import read_running_settings, with_running_issuer
from moiety_platform.cli.doctor.services import check_dashboard, check_gateway, check_issuer, check_traces
from moiety_platform.cli.doctor.store import check_store
from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.gateway_client import DEFAULT_URL
from moiety_platform.cli.option_groups import with_option_groups
from moiety_platform.cli.printing import print_line, print_prose
from moiety_platform.cli.tables import show_json
from moiety_platform.clock import Clock, SystemClock
from moiety_platform.engine_client.curve import CurveKeys
from moiety_platform.settings import GatewaySettings
from moiety_platform.supervisor.data_dir import read_first_keys, read_url
from moiety_platform.supervisor.errors import SupervisorError

AREAS = ("machine", "store", "engines", "gateway", "login", "traces", "dashboard")
MARKS = {Severity.OK: "✓", Severity.WARNING: "!", Severity.ERROR: "✗"}


@dataclass(frozen=True)
class DoctorContext:
    """Deployment to check. `only` are the areas; all areas if it is empty."""

    settings: GatewaySettings
    url: str
    admin_key: str | None
    dashboard: str | None = None
    only: frozenset[str] = frozenset()

    def has(self, area: str) -> bool:
        return not self.only or area in self.only


Check = Callable[[DoctorContext, Clock], AsyncIterator[Finding]]


@with_option_groups
def doctor(
    deployment: DeploymentOptions,
    dashboard: Annotated[str | None, typer.Option(help="URL of the dashboard.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Area to check: {', '.join(AREAS)}. May be given several times. If not given, all."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Find problems of a deployment and suggest remedies. Changes nothing; exits with 1 if there is an error.

    Give it the same environment, configuration file or options as the gateway.
    """
    context = doctor_context_of(deployment, dashboard, only)
    findings = asyncio.run(run_doctor(context, SystemClock()))
    counts = Counter(finding.level for finding in findings)
    if as_json:
        show_json(
            {
                "healthy": not counts[Severity.ERROR],
                "environment": versions(),
                "findings": [finding.as_json() for finding in findings],
            }
        )
    else:
        for finding in findings:
            show(finding)
        print_line(
            f"errors: {counts[Severity.ERROR]}, warnings: {counts[Severity.WARNING]}, passed: {counts[Severity.OK]}"
        )
    if counts[Severity.ERROR]:
        raise typer.Exit(1)


def doctor_context_of(
    deployment: DeploymentOptions, dashboard: str | None = None, only: list[str] | None = None
) -> DoctorContext:
    """Return the context from the options of a command. Raises typer.BadParameter or CommandError."""
    if unknown := set(only or ()) - set(AREAS):
        raise typer.BadParameter(f"there is no area {', '.join(sorted(unknown))}; choose from: {', '.join(AREAS)}")
    settings = deployment.load_settings()
    admin_key = deployment.admin_key
    if not settings.engines:
        settings = settings.model_copy(update={"engines": local_engine(settings.data_dir)})
    if admin_key is None:
        try:
            keys = read_first_keys(settings.data_dir)
        except SupervisorError as exc:
            raise CommandError(str(exc)) from exc
        admin_key = None if keys is None else keys.admin_key
    address = (deployment.url or read_url(settings.data_dir) or DEFAULT_URL).rstrip("/")
    return DoctorContext(settings, address, admin_key, dashboard and dashboard.rstrip("/"), frozenset(only or ()))


async def run_doctor(context: DoctorContext, clock: Clock) -> list[Finding]:
    """Run all checks of the chosen areas."""
    return [finding async for finding in _run_checks(context, clock)]


async def _run_checks(context: DoctorContext, clock: Clock) -> AsyncIterator[Finding]:
    for area, check in CHECKS.items():
        if context.has(area):
            async for finding in check(context, clock):
                yield finding


def _in_a_thread(check: Callable[[DoctorContext, datetime], Iterable[Finding]]) -> Check:
    async def checked(context: DoctorContext, clock: Clock) -> AsyncIterator[Finding]:
        for finding in await asyncio.to_thread(lambda: list(check(context, clock.now()))):
            yield finding

    return checked


CHECKS: dict[str, Check] = {
    "machine": _in_a_thread(lambda context, _: check_machine(context.settings.data_dir)),
    "store": lambda context, clock: check_store(context.settings, context.admin_key, clock),
    "engines": _in_a_thread(lambda context, _: check_engines(engines_of(context.settings))),
    "gateway": _in_a_thread(lambda context, now: check_gateway(context.url, context.admin_key, now)),
    "login": lambda context, _: check_login(context),
    "traces": _in_a_thread(lambda context, _: check_traces(context.settings, running_settings(context))),
    "dashboard": _in_a_thread(lambda context, _: check_dashboard(context.dashboard)),
}


async def check_login(context: DoctorContext) -> AsyncIterator[Finding]:
    running = await asyncio.to_thread(running_settings, context)
    async for finding in check_issuer(with_running_issuer(context.settings, running)):
        yield finding


def running_settings(context: DoctorContext) -> Mapping[str, Any]:
    """Return settings of the running gateway that this deployment's own settings may lack."""
    return read_running_settings(context.url, context.admin_key)


def engines_of(settings: GatewaySettings) -> EngineSettings:
    key = settings.external_engine_api_key
    return EngineSettings(settings.engines, curve_of(settings), key.get_secret_value() if key else None)


def curve_of(settings: GatewaySettings) -> CurveKeys | None:
    if not (settings.curve_server_key and settings.curve_public_key and settings.curve_secret_key):
        return None
    secret = settings.curve_secret_key.get_secret_value()
    return CurveKeys(settings.curve_server_key.encode(), settings.curve_public_key.encode(), secret.encode())


def show(finding: Finding) -> None:
    """Print a finding in one line, and the advice below it."""
    print_prose(f"{MARKS[finding.level]} {finding.area}: {finding.found}", err=False)
    if finding.advice:
        print_prose(f"    {finding.advice}", err=False)
    if finding.command:
        print_line(f"    $ {finding.command}")
