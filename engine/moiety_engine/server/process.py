"""Main function of the engine server's process: event loop, signals, readiness report, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import uuid
from collections.abc import Callable

import msgspec
import structlog
import zmq

from moiety_engine.server.core_link import CoreLink
from moiety_engine.server.engine_server import Ending, EngineServer
from moiety_engine.server.metrics import MetricsServer
from moiety_engine.server.settings import ServerSettings
from moiety_engine.server.unacknowledged_usage_log import UnacknowledgedUsageLog
from moiety_text.folder import TextModel
from moiety_wire.heartbeat import sending_heartbeats
from moiety_wire.shared_fields import copy_fields

log = structlog.get_logger()

MakeCore = Callable[[zmq.Context[zmq.Socket[bytes]]], CoreLink]


class ReadyReport(msgspec.Struct, frozen=True):
    """Report of readiness, printed as one line of JSON when the engine can serve."""

    event: str
    engine_id: str
    address: str
    model: str
    family: str
    max_context_tokens: int
    dtype: str
    device: str
    curve_public_key: str
    metrics_url: str


def run_server(
    settings: ServerSettings, text: TextModel, make_core: MakeCore, *, print_line: Callable[[str], None]
) -> Ending:
    """Serve until SIGTERM or SIGINT, or until the core dies. `print_line` prints the readiness report.

    Raises InvalidConfig if the file of unacknowledged usage or the metrics port is unusable.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(settings, text, make_core, print_line))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop  # noqa: PLC0415 - optional

    return uvloop.new_event_loop


async def _serve(
    settings: ServerSettings, text: TextModel, make_core: MakeCore, print_line: Callable[[str], None]
) -> Ending:
    engine_id = f"engine-{uuid.uuid4().hex[:12]}"
    stack = contextlib.ExitStack()
    unacknowledged = None
    if settings.unacknowledged_usage is not None:
        unacknowledged = UnacknowledgedUsageLog(settings.unacknowledged_usage)
        stack.callback(unacknowledged.close)
    metrics = MetricsServer.listen(settings.metrics_listen) if settings.metrics_listen else None
    if metrics is not None:
        stack.callback(metrics.close)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        core = make_core(context)
        server = EngineServer(settings, engine_id, text, core, context, unacknowledged=unacknowledged)
        _drain_on_signals(server)
        if metrics is not None:
            metrics.serve(server.stats)
        try:
            await server.start()
            if await server.wait_ready():
                _report(settings, server, metrics.url if metrics else "", print_line)
        except BaseException:  # also on cancellation: the core's process must not outlive this one
            await server.close()
            raise
        with sending_heartbeats(os.environ):
            return await server.wait()
    finally:
        stack.close()
        context.term()


def _drain_on_signals(server: EngineServer) -> None:
    """Drain at the first signal; abort the open requests at the second."""
    num_signals = 0

    def on_signal() -> None:
        nonlocal num_signals
        num_signals += 1
        server.begin_drain(None if num_signals == 1 else 0.0)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def _report(
    settings: ServerSettings, server: EngineServer, metrics_url: str, print_line: Callable[[str], None]
) -> None:
    card = server.card
    assert card is not None
    public = zmq.curve_public(settings.curve_secret_key).decode() if settings.curve_secret_key else ""
    own = {"address": server.address, "curve_public_key": public, "metrics_url": metrics_url}
    report = copy_fields(card, ReadyReport, event="engine_ready", **own)
    if settings.address_file is not None:
        partial = settings.address_file.with_name(f".{settings.address_file.name}.{os.getpid()}")
        partial.write_text(server.address + "\n")
        partial.replace(settings.address_file)
    print_line(msgspec.json.encode(report).decode())
