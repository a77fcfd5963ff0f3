"""The team of threads does every task exactly once, however its workers wake, and repeats to the bit."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from moiety_kernels.cpu.memory import fetch_add_i64
from moiety_kernels.cpu.structs import Address
from moiety_kernels.cpu.team import Team


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
