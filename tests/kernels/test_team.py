"""The team of threads does every task exactly once, however its workers wake, and repeats to the bit."""

from __future__ import annotations

import struct

import pytest
import torch

from moiety_kernels.cpu.compiling import task_address
from moiety_kernels.cpu.memory import fetch_add_i64, load_i64
from moiety_kernels.cpu.team import Team

LAYOUT = struct.Struct("q")


def count_task(args: int, task: int, scratch: int) -> None:
    fetch_add_i64(load_i64(args, 0) + 8 * task, 1)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_task_of_every_job_runs_exactly_once(num_threads: int) -> None:
    team = Team(num_threads)
    function = task_address(count_task)
    jobs = [1 + 37 * i % 101 for i in range(3000)]
    counts = torch.zeros(max(jobs), dtype=torch.int64)
    for tasks in jobs:
        team.run(function, tasks, LAYOUT, counts.data_ptr())
    expected = torch.tensor([sum(1 for tasks in jobs if tasks > task) for task in range(max(jobs))])
    assert torch.equal(counts, expected)
