"""The gateway process: opens its resources, serves HTTP until a signal, drains, and closes everything in order."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog
import uvloop

from moiety_huge_pages.process_memory import start_using_huge_pages
from moiety_platform.bootstrap.composition import assembled
from moiety_platform.bootstrap.server import GatewayServer
from moiety_platform.listening import bind
from moiety_platform.logs import configure_logging
from moiety_platform.reloading.reloader import watching
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.settings import GatewaySettings
from moiety_wire.heartbeat import sending_heartbeats

M_ARENA_MAX, ARENAS = -8, 2  # of malloc.h
GC_THRESHOLDS = (20_000, 50, 100)  # a request leaves few reference cycles, so frequent garbage collections waste time

log = structlog.get_logger(__name__)


def run_gateway(source: SettingsSource[GatewaySettings]) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends without draining.

    SIGHUP reloads the configuration file, if there is one. Raises AddressUnavailable, CannotUseEngine or
    CannotSendSpans.
    """
    settings = source.first
    gc.set_threshold(*GC_THRESHOLDS)
    configure_logging(settings.log_level, settings.log_format)
    _share_arenas()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # for batches of texts, and here they arrive one by one
    listener, operations = bind(settings.host, settings.port), None
    if settings.operations_port is not None:
        operations = bind(settings.operations_host, settings.operations_port, "--operations-port")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(source, listener, operations))


def _share_arenas() -> None:
    """Let threads allocate from few malloc arenas.

    By default glibc gives each database thread an arena of its own, which never returns memory. No effect on other
    systems.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)


async def _serve(
    source: SettingsSource[GatewaySettings], listener: socket.socket, operations_listener: socket.socket | None
) -> None:
    async with assembled(source) as gateway:
        server = gateway.server
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signal_number, server.request_exit)
        host, port = listener.getsockname()[:2]
        gc.collect()
        gc.freeze()  # collections need not scan objects that live as long as the process
        start_using_huge_pages()
        async with watching(gateway.services.reloader):
            engines = list(source.first.engines)
            log.info("gateway_listening", host=host, port=port, engines=engines)
            async with serving_operations(gateway.make_operations, operations_listener):
                with sending_heartbeats(os.environ):
                    await server.serve([listener])
        log.info("gateway_stopped")


@asynccontextmanager
async def serving_operations(
    make_server: Callable[[], GatewayServer], listener: socket.socket | None
) -> AsyncIterator[None]:
    """Serve the operations pages on that listener, if there is one, until the block ends. Without, no server is made.

    Their metrics remain readable while the gateway drains.
    """
    if listener is None:
        yield
        return
    server = make_server()
    host, port = listener.getsockname()[:2]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve([listener]))
        log.info("operations_listening", host=host, port=port)
        yield
        server.request_exit()
