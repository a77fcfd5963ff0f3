"""The team of threads does every task exactly once, however its workers wake, and repeats to the bit."""

from __future__ import annotations

import threading
from typing import NamedTuple

import pytest
import torch

from moiety_kernels.cpu import team as team_module
from moiety_kernels.cpu.memory import acquire_i64, fetch_add_i64, yield_core
from moiety_kernels.cpu.structs import Address
from moiety_kernels.cpu.team import Team

MOST_YIELDS = 2_000_000  # about a second


class CountArguments(NamedTuple):
    counts: Address  # int64, one for each task


def count_task(args: CountArguments, task: int, scratch: int) -> None:
    fetch_add_i64(args.counts + 8 * task, 1)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_task_of_every_job_runs_exactly_once(num_threads: int) -> None:
    team = Team(num_threads)
    jobs = [1 + 37 * i % 101 for i in range(3000)]
    counts = torch.zeros(max(jobs), dtype=torch.int64)
    for tasks in jobs:
        team.run(count_task, tasks, CountArguments(counts=counts.data_ptr()))
    expected = torch.tensor([sum(1 for tasks in jobs if tasks > task) for task in range(max(jobs))])
    assert torch.equal(counts, expected)


class MeetingArguments(NamedTuple):
    arrived: Address  # int64: how many of the two tasks run
    met: Address  # int64: how many of them saw the other


def meet_task(args: MeetingArguments, task: int, scratch: int) -> None:
    fetch_add_i64(args.arrived, 1)
    for _ in range(MOST_YIELDS):
        if acquire_i64(args.arrived) == 2:
            fetch_add_i64(args.met, 1)
            return
        yield_core()


class CallingLock:
    """The lock of a team's calls; the worker goes on to sleep once a call holds it."""

    def __init__(self, may_sleep: threading.Event) -> None:
        self._lock, self._may_sleep = threading.Lock(), may_sleep

    def __enter__(self) -> None:
        self._lock.acquire()
        self._may_sleep.set()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()


def test_a_worker_that_is_about_to_sleep_serves_a_call_that_does_not_wake_it(monkeypatch: pytest.MonkeyPatch) -> None:
    serve, leaves, may_sleep = team_module._serve, threading.Event(), threading.Event()

    def serve_and_wait_for_the_interpreter(state: int, scratch: int) -> None:
        serve(state, scratch)
        leaves.set()
        may_sleep.wait()

    monkeypatch.setattr(team_module, "_serve", serve_and_wait_for_the_interpreter)
    team, figures = Team(2), torch.zeros(2, dtype=torch.int64)
    team.run(meet_task, 2, MeetingArguments(figures[0:].data_ptr(), figures[1:].data_ptr()))
    assert leaves.wait(60)  # awake still, in the eyes of a caller
    figures.zero_()
    assert team._asleep == [False]
    monkeypatch.setattr(team, "_calling", CallingLock(may_sleep))
    team.run(meet_task, 2, MeetingArguments(figures[0:].data_ptr(), figures[1:].data_ptr()))
    assert figures.tolist() == [2, 2]
