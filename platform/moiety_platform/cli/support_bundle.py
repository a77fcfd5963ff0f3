"""Command `moiety support-bundle`: one file with the information that support needs, without secrets."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from pydantic import SecretStr

from moiety_platform.auth.pepper import FILE_NAME, PREVIOUS_FILE_NAME
from moiety_platform.cli.deployment_options import DeploymentOptions
from moiety_platform.cli.doctor.command import DoctorContext, doctor_context_of, run_doctor
from moiety_platform.cli.doctor.machine import versions
from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.option_groups import with_option_groups
from moiety_platform.cli.printing import print_prose
from moiety_platform.cli.redaction import redact_settings
from moiety_platform.clock import SystemClock
from moiety_platform.redaction import hide_url_passwords, redact_text
from moiety_platform.settings import GatewaySettings
from moiety_platform.supervisor.data_dir import KEYS_FILE

TIMEOUT_S = 10.0
MAX_LOG_BYTES = 2 * 1024 * 1024  # from the end of each log
OPERATIONS_FILES = {"health.json": "/healthz", "readiness.json": "/readyz", "metrics.txt": "/metrics"}
ADMIN_FILES = {
    "engines.json": "/admin/v1/engines",
    "classes.json": "/admin/v1/classes",
    "leases.json": "/admin/v1/quotas/leases",
    "reconciliation.json": "/admin/v1/usage/reconciliation",
}


@with_option_groups
def support_bundle(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. If not given, moiety-support-TIME.tar.gz.")
    ] = None,
    *,
    deployment: DeploymentOptions,
    operations_url: Annotated[
        str | None,
        typer.Option(
            envvar="MOIETY_OPERATIONS_URL",
            help="URL of the operations endpoints of the gateway. If not given, the value of --url.",
        ),
    ] = None,
    log: Annotated[
        list[Path] | None, typer.Option(help="Log file whose last lines are included. May be given several times.")
    ] = None,
) -> None:
    """Write versions, settings, the doctor's findings, metrics, engines' loads and the ends of logs into one file.

    Keys, passwords and tokens are removed. Check the file before you pass it on.
    """
    context = doctor_context_of(deployment)
    secrets = secrets_of(context)
    target = output or Path(f"moiety-support-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.tar.gz")
    logs = log or sorted((context.settings.data_dir / "logs").glob("*.log"))
    try:
        with target.open("xb") as file, tarfile.open(fileobj=file, mode="w:gz") as bundle:
            target.chmod(0o600)
            names = [
                _add(bundle, name, redact_text(text, secrets)) for name, text in _parts(context, operations_url, logs)
            ]
    except OSError as exc:
        raise CommandError(f"cannot write {target} ({exc.strerror}); give another name as --output") from exc
    print_prose(f"{target} has {', '.join(names)}; read it before you share it", err=False)


def secrets_of(context: DoctorContext) -> list[str]:
    """Return all secrets that this process knows."""
    settings = context.settings
    found = [one.get_secret_value() for _, one in settings if isinstance(one, SecretStr)]
    found += [context.admin_key or ""]
    keys = settings.data_dir / KEYS_FILE
    for pepper in (settings.data_dir / FILE_NAME, settings.data_dir / PREVIOUS_FILE_NAME):
        if pepper.exists():
            found.append(pepper.read_text(errors="replace").strip())
    if keys.exists():
        found += [str(value) for name, value in json.loads(keys.read_text()).items() if name.endswith("key")]
    return found


def _parts(context: DoctorContext, operations_url: str | None, logs: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each part."""
    yield "versions.json", _json(versions())
    yield "settings.json", _json(redact_settings(_settings(context.settings)))
    findings = asyncio.run(run_doctor(context, SystemClock()))
    yield "doctor.json", _json([finding.as_json() for finding in findings])
    with httpx.Client(base_url=operations_url or context.url, timeout=TIMEOUT_S) as http:
        for name, path in OPERATIONS_FILES.items():
            yield name, _get(http, path, None)
    with httpx.Client(base_url=context.url, timeout=TIMEOUT_S) as http:
        if context.admin_key is not None:
            for name, path in ADMIN_FILES.items():
                yield name, _get(http, path, context.admin_key)
    for place in logs:
        yield f"logs/{place.name}", _end_of(place)


def _settings(settings: GatewaySettings) -> dict[str, Any]:
    return {name: value for name, value in settings}  # noqa: C416  a model is not a mapping


def _get(http: httpx.Client, path: str, key: str | None) -> str:
    """Return the response's text, or the reason for a missing response, which belongs in the bundle too."""
    try:
        return http.get(path, headers={} if key is None else {"Authorization": f"Bearer {key}"}).text
    except httpx.HTTPError as exc:
        return f"{path} of {hide_url_passwords(str(http.base_url))} does not answer: {type(exc).__name__}"


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError as exc:
        return f"cannot read {path}: {exc.strerror}"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _add(bundle: tarfile.TarFile, name: str, text: str) -> str:
    data = text.encode()
    entry = tarfile.TarInfo(f"moiety-support/{name}")
    entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
    bundle.addfile(entry, io.BytesIO(data))
    return name
