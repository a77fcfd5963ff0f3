"""The progress of compilation counts what this process compiles, and nothing that comes from the cache."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from numba import config

from moiety_engine.core.service import _Progress
from moiety_engine.messages import CoreHello, CoreState
from moiety_kernels.cpu import compiling
from moiety_kernels.cpu.compile_progress import progress
from moiety_kernels.cpu.memory import store_i64


def _writes_seven(address: int) -> None:
    store_i64(address, 0, 7)


class _Link:
    def __init__(self) -> None:
        self.sent: list[CoreHello] = []

    def send(self, message: CoreHello) -> None:
        self.sent.append(message)


def test_functions_are_counted_when_compiled_and_not_when_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    before = progress.num_compiled
    monkeypatch.setattr(progress, "report", counts.append)
    monkeypatch.setattr(compiling, "use_cache", lambda: True)
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    for _ in range(2):
        compiling._address.cache_clear()
        compiling.function_address(_writes_seven, 1)
    assert counts == [before + 1]


def test_the_server_is_told_at_most_each_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    link, times = _Link(), iter((100.0, 100.5, 101.9, 102.5, 103.0))
    monkeypatch.setattr("moiety_engine.core.service.time.monotonic", lambda: next(times))
    report = _Progress(link)
    for number in range(1, 6):
        report.compiled(number)
    assert [hello.state for hello in link.sent] == [CoreState.LOADING] * 2
    assert [hello.message.rsplit(": ")[-1] for hello in link.sent] == ["1 so far", "4 so far"]


def test_the_compilers_thread_never_uses_the_link_of_the_main_thread() -> None:
    link = _Link()
    report = _Progress(link)
    beside = threading.Thread(target=report.compiled, args=(1,))
    beside.start()
    beside.join()
    assert link.sent == []
    report.compiled(2)
    assert len(link.sent) == 1, "the main thread reports at its first function"
