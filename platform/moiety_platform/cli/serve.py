"""Command `moiety serve`: from the options to the supervisor. Imports neither the web stack nor torch."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path

from moiety_platform.cli import serve_options as given
from moiety_platform.cli.errors import CommandError
from moiety_platform.supervisor.console import standard_console
from moiety_platform.supervisor.data_dir import PRIVATE_UMASK, DataDir
from moiety_platform.supervisor.errors import SupervisorError
from moiety_platform.supervisor.plan import DEMO_NAME, TOKEN_VARIABLE, ServeOptions
from moiety_platform.supervisor.ports import LOOPBACK, OPERATIONS_PORT, claim_port
from moiety_platform.supervisor.serve import serve as run_serve


def serve(
    more: given.MoreArgument = None,
    model: given.ModelOption = None,
    name: given.NameOption = None,
    host: given.HostOption = "127.0.0.1",
    port: given.PortOption = 8000,
    operations_host: given.OperationsHostOption = "127.0.0.1",
    operations_port: given.OperationsPortOption = None,
    data_dir: given.DataDirOption = Path(".moiety"),
    dashboard_port: given.DashboardPortOption = 8501,
    no_dashboard: given.NoDashboardOption = False,
    traces_port: given.TracesPortOption = 0,
    no_traces: given.NoTracesOption = False,
    drain_s: given.DrainOption = 30,
    config: given.ConfigOption = None,
    device: given.DeviceOption = None,
    dtype: given.DtypeOption = None,
    quantization: given.QuantizationOption = None,
    load_format: given.LoadFormatOption = None,
    moe_kernel: given.MoeKernelOption = None,
    batch_invariant: given.BatchInvariantOption = False,
    batching: given.BatchingOption = None,
    max_batch_tokens: given.MaxBatchTokensOption = None,
    max_running: given.MaxRunningOption = None,
    max_context_tokens: given.MaxContextTokensOption = None,
    kv_memory_bytes: given.KvMemoryBytesOption = None,
    threads: given.ThreadsOption = None,
    scripted: given.ScriptedOption = False,
) -> None:
    """Serve a model to tenants with keys: engine, gateway, dashboard, trace store and an embedded database.

    The first start creates an admin key, a tenant and a key for it. Ctrl-C lets running answers end, then stops.

    Ends with 0 after a stop, 1 if it could not start, 2 for a wrong option.
    """
    os.umask(PRIVATE_UMASK)
    engine = {
        "--device": device,
        "--dtype": dtype,
        "--quantization": quantization,
        "--load-format": load_format,
        "--moe-kernel": moe_kernel,
        "--batching": batching,
        "--max-batch-tokens": max_batch_tokens,
        "--max-running": max_running,
        "--max-context-tokens": max_context_tokens,
        "--kv-memory-bytes": kv_memory_bytes,
        "--threads": threads,
    }
    flags = [name for name, wanted in (("--batch-invariant", batch_invariant), ("--scripted", scripted)) if wanted]
    arguments = [str(word) for option, value in engine.items() if value is not None for word in (option, value)]
    try:
        options = ServeOptions(
            host=host,
            port=claim_port(host, port, "--port"),
            dashboard_port=None if no_dashboard else claim_port(host, dashboard_port, "--dashboard-port"),
            model=model,
            name=name or name_of(model),
            drain_s=drain_s,
            config=config,
            traces_port=None if no_traces else claim_port("127.0.0.1", traces_port, "--traces-port"),
            operations_host=operations_host,
            operations_port=claim_operations_port(host, operations_host, operations_port),
            traces_token=os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16),
            engine_arguments=(*arguments, *flags, *(more or [])),
        )
        run(options, data_dir)
    except SupervisorError as exc:
        raise CommandError(str(exc)) from exc


def claim_operations_port(host: str, operations_host: str, wanted: int | None) -> int | None:
    """Return the port of the operations listener; None if the API's port also serves it, which requires loopback."""
    if wanted is None and host in LOOPBACK:
        return None
    port = OPERATIONS_PORT if wanted is None else wanted
    return claim_port(operations_host, port, "--operations-port")


def run(options: ServeOptions, data_dir: Path) -> None:
    """Run until a stop is requested. Raises SupervisorError."""
    with DataDir(data_dir) as opened:
        if "MOIETY_KEY_PEPPER" not in os.environ:
            opened.check_pepper()
        asyncio.run(run_serve(options, opened, standard_console()))


def name_of(model: str | None) -> str:
    """Return the demo model's name, the last part of a folder's path, or a hub id unchanged."""
    if model is None:
        return DEMO_NAME
    return Path(model).resolve().name if Path(model).is_dir() else model
