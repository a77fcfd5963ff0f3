"""The process's team of compute threads: runs a task function for every index of a range, on all threads at once.

A thread takes the next index when it has finished one, so that a core that is busy with other work costs only its own
share. Between the operations of a step the workers spin and yield the core to other threads; after a short time they
sleep. A job is published as one ticket of generation, number of tasks and next task, so a worker that wakes late cannot
take a task of the wrong job. This module contains no operation.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numba import types

from moiety_kernels.cpu.compiling import driver_address, jit, task_address
from moiety_kernels.cpu.instructions import COMPILE_ONLY
from moiety_kernels.cpu.memory import (
    acquire_i64,
    call_driver,
    call_task,
    compare_swap_i64,
    fetch_add_i64,
    load_i64,
    release_i64,
    store_i64,
    yield_core,
)
from moiety_kernels.cpu.structs import Address, CacheLine, Int64, S, Struct, layout_of, size_of, store_struct, struct_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

SCRATCH_BYTES = 7 << 20  # per thread; kernels size their blocks by it
ARGS_SIZE = 64  # int64 values that a job's arguments may take
CACHE_LINE = 64
SPINS_BEFORE_YIELD = 2_000
YIELDS_BEFORE_SLEEP = 2_000

_BITS = 20  # bits of the next task and of the number of tasks
_MASK = (1 << _BITS) - 1
_GENERATIONS = (1 << 23) - 1
MAX_TASKS = _MASK
SEVERAL_TASKS = 2  # number of tasks of a driver's jobs, as far as is known before it runs


class CurrentJob(NamedTuple):
    """The job that the threads run."""

    function: Address  # of the task
    args: Address


class TeamState(NamedTuple):
    """State that the threads share; what different threads write is in different cache lines."""

    ticket: CacheLine
    done: CacheLine  # number of finished tasks of the current job
    job: CurrentJob


class JobRow(NamedTuple):
    """One recorded job of a program."""

    driver: Address
    function: Address
    args: Address
    num_tasks: Int64


_STATE_BYTES, _JOB_BYTES = size_of(TeamState), size_of(JobRow)


@jit
def _work(state: int, scratch: int) -> bool:
    """Run tasks of the current job until none is left; return whether it ran any."""
    shared, did = struct_at(TeamState, state), False
    while True:
        ticket = acquire_i64(shared.ticket)
        task = ticket & _MASK
        if task >= (ticket >> _BITS) & _MASK:
            return did
        if compare_swap_i64(shared.ticket, ticket, ticket + 1):
            call_task(shared.job.function, shared.job.args, task, scratch)
            fetch_add_i64(shared.done, 1)
            did = True


@jit
def _serve(state: int, scratch: int) -> None:
    """Run jobs until the worker has been idle long enough to sleep."""
    idle = 0
    while idle < SPINS_BEFORE_YIELD + YIELDS_BEFORE_SLEEP:
        if _work(state, scratch):
            idle = 0
        else:
            idle += 1
            if idle > SPINS_BEFORE_YIELD:
                yield_core()


@jit
def parallel(state: int, scratch: int, function: int, args: int, num_tasks: int) -> None:
    """Run function(args, task, scratch) for every task below `num_tasks`; returns when all are done."""
    if num_tasks == 1:
        call_task(function, args, 0, scratch)
        return
    shared = struct_at(TeamState, state)
    generation = ((load_i64(shared.ticket, 0) >> (2 * _BITS)) + 1) & _GENERATIONS
    store_struct(shared.job, CurrentJob(function=function, args=args))
    store_i64(shared.done, 0, 0)
    release_i64(shared.ticket, (generation << (2 * _BITS)) | (num_tasks << _BITS))
    _work(state, scratch)
    spins = 0
    while acquire_i64(shared.done) < num_tasks:
        spins += 1
        if spins > SPINS_BEFORE_YIELD:
            yield_core()


@jit
def _replay(state: int, scratch: int, table: int, num_jobs: int) -> None:
    for row in range(table, table + _JOB_BYTES * num_jobs, _JOB_BYTES):
        job = struct_at(JobRow, row)
        call_driver(job.driver, state, scratch, job.function, job.args, job.num_tasks)


@dataclass(frozen=True, slots=True)
class Job:
    """One call of a driver, with its packed arguments."""

    driver: Any
    function: int
    num_tasks: int
    args: NDArray[np.int64]


class Program:
    """Recorded jobs that run again in one call, without Python between them."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._args = np.stack([job.args for job in jobs])
        rows = [
            JobRow(driver_address(job.driver), job.function, args.ctypes.data, job.num_tasks)
            for job, args in zip(jobs, self._args, strict=True)
        ]
        self.table = np.array(rows, dtype=np.int64)
        self.address, self.num_jobs = self.table.ctypes.data, len(jobs)


def _aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeroed memory aligned to a cache line."""
    memory = np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8)
    return memory[-memory.ctypes.data % CACHE_LINE :]


class Team:
    """Owner of the worker threads, each thread's scratch memory and the arguments of the running job."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._state = np.zeros(_STATE_BYTES // 8, dtype=np.int64)
        self._scratch = [_aligned(SCRATCH_BYTES) for _ in range(num_threads)]
        self._args = np.zeros(ARGS_SIZE, dtype=np.int64)
        self._packed = self._args.data
        self._calling = threading.Lock()
        self._recorded: list[Job] | None = None
        self._asleep = [True] * (num_threads - 1)
        self._wake = [threading.Event() for _ in range(num_threads - 1)]
        self.addresses = (self._state.ctypes.data, self._scratch[0].ctypes.data, self._args.ctypes.data)
        for index in range(num_threads - 1):
            threading.Thread(target=self._live, args=(index,), name=f"compute-{index + 1}", daemon=True).start()

    def _live(self, index: int) -> None:
        state, scratch = self._state.ctypes.data, self._scratch[index + 1].ctypes.data
        while True:
            self._asleep[index] = True
            # A caller that saw this thread awake, while it waited for the interpreter here, does not wake it.
            if not self._calling.locked():
                self._wake[index].wait()
            self._wake[index].clear()
            self._asleep[index] = False
            _serve(state, scratch)

    def run(self, task: Callable[[S, int, int], None], num_tasks: int, args: S) -> None:
        """Run the task function for every task number below `num_tasks`."""
        self._call(parallel, task_address(task, type(args)), num_tasks, args)

    def drive(self, driver: Any, args: Struct) -> None:
        """Call a compiled driver(state, scratch, function, args, num_tasks), which runs jobs that `args` name."""
        self._call(driver, 0, SEVERAL_TASKS, args)

    def _call(self, driver: Any, function: int, num_tasks: int, args: Struct) -> None:
        with self._calling:
            if num_tasks > 1 and True in self._asleep:
                self._wake_all()
            layout_of(type(args)).pack_into(self._packed, args)
            if self._recorded is not None:
                self._recorded.append(Job(driver, function, num_tasks, self._args.copy()))
            state, scratch, packed = self.addresses
            driver(state, scratch, function, packed, num_tasks)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Job]]:
        """Yield a list of the jobs that run inside the context. The caller of a replay keeps their tensors alive."""
        assert self._recorded is None, "recordings do not nest"
        jobs: list[Job] = []
        self._recorded = jobs
        try:
            yield jobs
        finally:
            self._recorded = None

    def replay(self, program: Program) -> None:
        """Run the program's jobs again in sequence, on the current contents of its tensors."""
        with self._calling:
            if True in self._asleep:
                self._wake_all()
            state, scratch, _ = self.addresses
            _replay(state, scratch, program.address, program.num_jobs)

    def _wake_all(self) -> None:
        for index, asleep in enumerate(self._asleep):
            if asleep:
                self._wake[index].set()


class CompileOnlyTeam(Team):
    """Team that compiles what it would run, for a CPU level that this machine need not have (`levels.py`)."""

    def __init__(self) -> None:
        super().__init__(1)
        _serve.compile((types.int64,) * 2)  # type: ignore[attr-defined]
        _replay.compile((types.int64,) * 4)  # type: ignore[attr-defined]

    def _call(self, driver: Any, function: int, num_tasks: int, args: Struct) -> None:
        driver.compile((types.int64,) * 5)
        if self._recorded is not None:
            self._recorded.append(Job(driver, function, num_tasks, self._args.copy()))

    def replay(self, program: Program) -> None:
        """Leave the tensors of the program as they are; its jobs were compiled when they were recorded."""


@functools.cache
def team() -> Team:
    """Return the process's team; it has as many threads as torch is set to use at the first call."""
    return CompileOnlyTeam() if COMPILE_ONLY else Team(torch.get_num_threads())
