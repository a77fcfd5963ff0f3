"""Plan of a local serve: from its options to the command lines of the parts and the announcement for the user."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from moiety_platform.supervisor.data_dir import DataDir, FirstKeys
from moiety_platform.supervisor.log_file import LogRotation
from moiety_platform.supervisor.ports import reachable_host
from moiety_platform.supervisor.process import ProcessSpec

DASHBOARD_HEALTH = "/_stcore/health"
DEMO_QUESTION = "What is 17 + 25?"
TOKEN_VARIABLE = "MOIETY_TRACES_TOKEN"
NEUTRAL_QUESTION = "Say hello in one short sentence."


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Validated options of `moiety serve`. `engine_arguments` are passed unchanged to the engine's command line."""

    host: str
    port: int
    dashboard_port: int | None  # None: no dashboard
    model: str | None  # None: the bundled demo model
    name: str
    drain_s: int
    config: Path | None = None
    engine_arguments: tuple[str, ...] = field(default_factory=tuple)
    traces_port: int | None = None  # port of the trace store; None: traces are not stored
    traces_token: str = field(default="", repr=False)  # token that the gateway sends to the trace store
    operations_host: str = "127.0.0.1"
    operations_port: int | None = None  # None: /metrics and /schema are on `port`
    hang_timeout_s: float = 30.0  # 0: a part that does not respond is not restarted
    log_rotation: LogRotation = field(default_factory=LogRotation)
    cpu_slos: bool = False  # the first start gives the built-in classes SLOs for an engine on a CPU

    @property
    def url(self) -> str:
        return f"http://{reachable_host(self.host)}:{self.port}"

    @property
    def operations_address(self) -> tuple[str, int]:
        """Return the address that reports readiness with its reasons."""
        if self.operations_port is None:
            return reachable_host(self.host), self.port
        return reachable_host(self.operations_host), self.operations_port

    @property
    def operations_url(self) -> str:
        host, port = self.operations_address
        return f"http://{host}:{port}"


def engine_process(options: ServeOptions, data_dir: DataDir, socket: Path) -> ProcessSpec:
    arguments = ["engine", "--listen", f"ipc://{socket}", "--name", options.name]
    arguments += ["--unacknowledged-usage", str(data_dir.unacknowledged_usage_path)]
    if options.model is not None:
        arguments += ["--model", options.model]
    return ProcessSpec("engine", (*arguments, *options.engine_arguments))


def gateway_process(options: ServeOptions, data_dir: DataDir, socket: Path) -> ProcessSpec:
    arguments = [
        "gateway", "--host", options.host, "--port", str(options.port), "--data-dir", str(data_dir.path),
        "--engine", f"ipc://{socket}", "--drain-s", str(options.drain_s),
        "--migrate", "--first-keys", str(data_dir.keys_path),
    ]  # fmt: skip
    if options.cpu_slos:
        arguments.append("--cpu-slos")
    if options.operations_port is not None:
        arguments += ["--operations-host", options.operations_host, "--operations-port", str(options.operations_port)]
    if options.config is not None:
        arguments += ["--config", str(options.config)]
    environment = {"MOIETY_SUPERVISOR_STATUS": str(data_dir.status_path)}
    if options.traces_port is not None:
        endpoint = f"http://127.0.0.1:{options.traces_port}/otlp"
        environment |= {"MOIETY_TRACES_ENDPOINT": endpoint, TOKEN_VARIABLE: options.traces_token}
    return ProcessSpec("gateway", tuple(arguments), environment)


def traces_process(options: ServeOptions, data_dir: DataDir) -> ProcessSpec:
    """Return the trace store's process; it listens on loopback only, unless the environment says otherwise."""
    assert options.traces_port is not None
    arguments = ["traces", "--port", str(options.traces_port), "--data-dir", str(data_dir.path), "--migrate"]
    if options.config is not None:
        arguments += ["--config", str(options.config)]
    return ProcessSpec("traces", tuple(arguments), {TOKEN_VARIABLE: options.traces_token}, serves_requests=False)


def dashboard_process(options: ServeOptions) -> ProcessSpec:
    """Return the dashboard's process. It gets no key: its user enters one."""
    assert options.dashboard_port is not None
    arguments = ("dashboard", "--host", options.host, "--port", str(options.dashboard_port), "--gateway", options.url)
    environment = {"MOIETY_ADMIN_KEY": ""}  # not even one from our environment
    health = (reachable_host(options.host), options.dashboard_port, DASHBOARD_HEALTH)
    return ProcessSpec("dashboard", arguments, environment, health, serves_requests=False)


def curl_command(options: ServeOptions, tenant_key: str) -> str:
    """Return a chat completion request to paste into a shell, over several lines."""
    question = DEMO_QUESTION if options.model is None else NEUTRAL_QUESTION
    body = json.dumps({"model": options.name, "messages": [{"role": "user", "content": question}], "temperature": 0})
    return (
        f"curl -s {options.url}/v1/chat/completions \\\n"
        f"  -H 'Authorization: Bearer {tenant_key}' \\\n"
        f"  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(body)}"
    )


def announcement(options: ServeOptions, keys: FirstKeys, new_keys: bool) -> str:
    """Return the text with addresses, keys and a command to try.

    The tenant's key is always included; the admin key precedes it only if it is new.
    """
    lines = ["", f"  API         {options.url}/v1", f"  API schema  {options.operations_url}/schema"]
    if options.operations_port is not None:
        lines.append(f"  metrics     {options.operations_url}/metrics")
    if options.dashboard_port is not None:
        address = f"http://{reachable_host(options.host)}:{options.dashboard_port}"
        lines.append(f"  dashboard   {address}  (sign in with the admin key)")
    lines.append(f"  model       {options.name}")
    if new_keys:
        lines.append(f"  admin key   {keys.admin_key}")
    lines.append(f"  tenant key  {keys.tenant_key}  (tenant {keys.tenant})")
    return "\n".join([*lines, "", curl_command(options, keys.tenant_key), "", ""])
