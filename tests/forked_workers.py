"""Worker processes for tests: forks of the process that has collected them (`--workers=N`).

Imports and collection take tens of seconds of processor time. Here they happen once, while each worker of pytest-xdist
collects everything again. A worker gets the tests of one file at a time, or of all files of a group (`worker_groups` in
the configuration, prefixes of paths), so that fixtures of modules and packages are made once. The order of groups is
the order of the collected tests. Needs the start method `fork`, which Windows does not have.

PYTEST_DONT_REWRITE: it has no assertions, and `conftest.py` imports it before pytest does.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from _pytest._io import TerminalWriter
from _pytest.capture import CaptureManager
from _pytest.tmpdir import TempPathFactory

END_S = 60.0  # for a worker that is interrupted to end its fixtures
PARENTS_ALONE = ("terminalreporter", "terminalprogress-plugin", "lfplugin", "nfplugin", "stepwiseplugin")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", type=int, default=0, metavar="N", help="Run tests in N processes that are forked after collection."
    )
    parser.addini("worker_imports", "Modules to import before workers start, if tests use their package.", "linelist")
    parser.addini("imports_of_workers", "Modules that may be imported only after the fork.", "linelist")
    parser.addini("worker_groups", "Prefixes of paths: the files with one of them run in one worker.", "linelist")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("workers") <= 0:
        return
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("--workers and --numprocesses exclude each other")
    config.pluginmanager.register(ForkedWorkers(config.getoption("workers")), "forked_workers")
    if (reporter := config.pluginmanager.get_plugin("terminalreporter")) is not None:
        reporter.showfspath = False  # files alternate; with -v each line has its file


def _check_imports(config: pytest.Config) -> None:
    """Raise UsageError if a module is imported whose threads forked processes would lack."""
    for module in config.getini("imports_of_workers"):
        if module in sys.modules:
            raise pytest.UsageError(f"{module} was imported during collection; import it in tests and fixtures")


def group_of(item: pytest.Item) -> str:
    """Return the name of the test's group: the prefix in `worker_groups` that its file has, or the file."""
    file = item.nodeid.split("::", 1)[0]
    return next((prefix for prefix in item.config.getini("worker_groups") if file.startswith(prefix)), file)


@dataclass(eq=False)
class _Worker:
    """A worker process, as the process that collected the tests sees it."""

    process: BaseProcess
    connection: Connection
    assigned: deque[int] = field(default_factory=deque)  # tests that have not ended, by their index
    has_ended: bool = False


class ForkedWorkers:
    """The loop that gives tests to workers and passes their reports to the plugins of this process."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._num_started = 0
        self._groups: deque[list[int]] = deque()
        self._workers: list[_Worker] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop says why no test runs
        groups: dict[str, list[int]] = {}
        for index, item in enumerate(session.items):
            groups.setdefault(group_of(item), []).append(index)
        self._groups.extend(groups.values())
        _check_imports(session.config)
        for module in session.config.getini("worker_imports"):
            if module.split(".")[0] in sys.modules:
                importlib.import_module(module)  # once, and not in each worker
        gc.freeze()  # what workers share: collections of garbage would copy it
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # that workers' folders are in
        try:
            for _ in range(min(self.num_workers, len(groups))):
                self._start(session)
            while self._workers:
                self._take_messages(session)
        finally:
            self._interrupt()
        return True

    def _start(self, session: pytest.Session) -> None:
        """Fork a worker."""
        ours, theirs = multiprocessing.Pipe()
        others = [ours, *(worker.connection for worker in self._workers)]
        process = multiprocessing.get_context("fork").Process(
            target=_work, args=(session, theirs, others, self._num_started), name=f"tests-{self._num_started}"
        )
        self._num_started += 1
        with warnings.catch_warnings():
            # from Python 3.12 on, of threads that libraries in C and Rust have started
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        self._workers.append(_Worker(process, ours))

    def _take_messages(self, session: pytest.Session) -> None:
        """Wait for messages, and act on one of each worker that sent some. Raises Failed or Interrupted at the end."""
        waited = [source for worker in self._workers for source in (worker.connection, worker.process.sentinel)]
        ready = wait(waited)
        for worker in tuple(self._workers):
            if worker.connection in ready or worker.process.sentinel in ready:
                try:
                    message = worker.connection.recv() if worker.connection.poll() else None
                except (EOFError, ConnectionResetError):
                    message = None
                if message is None:
                    self._take_end(session, worker)
                else:
                    self._act(session, worker, *message)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _act(self, session: pytest.Session, worker: _Worker, kind: str, *content: Any) -> None:
        hook = session.config.hook
        match kind:
            case "more":
                group = self._groups.popleft() if self._groups else []
                worker.assigned.extend(group)
                worker.connection.send(group)
            case "begun":
                hook.pytest_runtest_logstart(nodeid=content[0], location=content[1])
            case "report":
                report = hook.pytest_report_from_serializable(config=session.config, data=content[0])
                hook.pytest_runtest_logreport(report=report)
            case "ended":
                worker.assigned.popleft()
                hook.pytest_runtest_logfinish(nodeid=content[0], location=content[1])
            case "warning":
                text, category, file, line, when, nodeid = content
                hook.pytest_warning_recorded.call_historic(
                    kwargs={
                        "warning_message": warnings.WarningMessage(text, category, file, line),
                        "when": when,
                        "nodeid": nodeid,
                        "location": None,
                    }
                )
            case "broken":
                raise RuntimeError(f"a worker cannot go on:\n{content[0]}")
            case "end":
                worker.has_ended = True

    def _take_end(self, session: pytest.Session, worker: _Worker) -> None:
        """Remove a worker whose process is gone. If it died in a test, report that, and run the rest in another one."""
        worker.process.join()
        worker.connection.close()
        self._workers.remove(worker)
        if worker.has_ended:
            return
        if not worker.assigned:
            raise RuntimeError(f"a worker ended between tests with exit code {worker.process.exitcode}")
        item = session.items[worker.assigned.popleft()]
        text = f"{item.nodeid}: the worker process ended with exit code {worker.process.exitcode}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        if worker.assigned:
            self._groups.appendleft(list(worker.assigned))
        if self._groups:
            self._start(session)

    def _interrupt(self) -> None:
        """End the workers that still run, as Control-C does."""
        for worker in self._workers:
            if worker.process.pid is not None and worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGINT)
        for worker in self._workers:
            worker.process.join(END_S)
            worker.process.kill()
            worker.connection.close()
        self._workers.clear()


class _Sender:
    """Plugin of a worker that sends what it is told to the process that collected the tests."""

    def __init__(self, connection: Connection, config: pytest.Config) -> None:
        self.connection = connection
        self.config = config
        self.is_registered = False  # registration repeats the warnings of the collection

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.connection.send(("begun", nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("report", data))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.connection.send(("ended", nodeid, location))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        if self.is_registered:
            category = warning_message.category or UserWarning
            place = warning_message.filename, warning_message.lineno
            self.connection.send(("warning", str(warning_message.message), category, *place, when, nodeid))


class _NoReporter:
    """Place of the terminal reporter in a worker: other plugins write to what `_tw` returns, which is captured."""

    @property
    def _tw(self) -> TerminalWriter:
        return TerminalWriter(sys.stderr)


def _work(session: pytest.Session, connection: Connection, others: Iterable[Connection], number: int) -> None:
    """Run tests as a worker until there are none left. `others`: ends of the collecting process, closed here."""
    for other in others:
        other.close()  # else this process would not see the end of that one
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started all in the background
    last: pytest.Item | None = None
    try:
        _prepare(session.config, connection, number)
        for group in iter(partial(_ask_for_tests, session, connection), []):
            for item, following in pairwise([*group, session]):  # fixtures of the session outlive a group
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            last = group[-1]
        if last is not None:
            _end_session(session, last)
        connection.send(("end",))
    except (KeyboardInterrupt, EOFError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal and of the collecting process: one is enough
        session._setupstate.teardown_exact(None)
    except BaseException:
        connection.send(("broken", traceback.format_exc()))
        session._setupstate.teardown_exact(None)
    finally:
        warnings.simplefilter("ignore", ResourceWarning)  # of what other processes leave to their end, too
        atexit._run_exitfuncs()  # servers that fixtures left to the end of the process; `multiprocessing` skips them


def _ask_for_tests(session: pytest.Session, connection: Connection) -> list[pytest.Item]:
    connection.send(("more",))
    return [session.items[index] for index in connection.recv()]


def _end_session(session: pytest.Session, last: pytest.Item) -> None:
    """End the fixtures of the session, and report it at the last test if one of them fails."""
    call = pytest.CallInfo.from_call(lambda: session._setupstate.teardown_exact(None), "teardown")
    if call.excinfo is not None:
        report = last.ihook.pytest_runtest_makereport(item=last, call=call)
        last.ihook.pytest_runtest_logreport(report=report)


def _prepare(config: pytest.Config, connection: Connection, number: int) -> None:
    """Give the worker its own captured output, temporary folder, and plugins that report to the collecting process."""
    capture: CaptureManager | None = config.pluginmanager.get_plugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()  # of the files that all processes share
        capture.start_global_capturing()
    for name in PARENTS_ALONE:
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    config.pluginmanager.register(_NoReporter(), "terminalreporter")
    sender = _Sender(connection, config)
    config.pluginmanager.register(sender)
    sender.is_registered = True
    factory: TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"worker-{number}"
    factory._basetemp.mkdir(mode=0o700)
