"""Forked grammar processes: a trial compiles one grammar within hard limits; a stepper steps those that passed.

Limits are the kernel's: processor time by a profiling timer, wall time by a real timer, memory by the size of the
address space. A child that reaches one is ended by a signal, also in the middle of native code.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from typing import NoReturn

from llguidance import LLMatcher

from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.frames import (
    EXIT_CRASHED,
    EXIT_OUT_OF_MEMORY,
    ChildOrder,
    PrepareOrder,
    PrepareReport,
    StepOrder,
    StepperOrder,
    StepReport,
    StepRow,
    TrialOrder,
    TrialReport,
    receive_frame,
    receive_frame_with_fds,
    send_frame,
)
from moiety_engine.structured_outputs.mask_buffer import MaskBuffer
from moiety_engine.structured_outputs.state import TOO_COSTLY, GrammarState

PR_SET_PDEATHSIG = 1  # of prctl(2)
TRIAL_NICENESS = 5  # compilations give way to the steps of the model
MAX_ROW_S = 0.25  # processor time of one mask: a grammar that takes longer holds up too many
FREE_ROW_S = 0.02  # processor time of one mask that costs a request nothing; what is beyond it adds up,
MAX_EXCESS_S = 2.0  # to this much in all
TOKENS_AT_ONCE = 256  # of an answer that is taken in again: so many count as one operation


def run_child(link: socket.socket, compiler: GrammarCompiler) -> NoReturn:
    """Be the child that the first frame asks for, and end the process."""
    code = EXIT_CRASHED
    try:
        _end_with_parent()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 2)  # complaints of native code may quote what a client sent
        order, fds = receive_frame_with_fds(link, ChildOrder)
        if isinstance(order.role, TrialOrder):
            _run_trial(link, compiler, order.role)
        else:
            _Stepper(link, compiler, order.role, *fds).serve()
        code = 0
    except EOFError:
        code = 0  # the core is gone
    except MemoryError:
        code = EXIT_OUT_OF_MEMORY
    except BaseException:
        code = EXIT_CRASHED
    finally:
        os._exit(code)


def _end_with_parent() -> None:
    """Die with the template, which alone can tell the core how a child ended."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_CRASHED)


def limit_memory(more_bytes: int) -> None:
    """Let the address space grow by so much from now on, and write no core file."""
    limit_bytes = _memory_pages()[0] * resource.getpagesize() + more_bytes
    _, hard_bytes = resource.getrlimit(resource.RLIMIT_AS)
    if hard_bytes != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, hard_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _resident_bytes() -> int:
    return _memory_pages()[1] * resource.getpagesize()


def _memory_pages() -> tuple[int, int]:
    """Of this process: its address space, and what of it is in memory."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[0]), int(fields[1])


# ── trial ──


def _run_trial(link: socket.socket, compiler: GrammarCompiler, order: TrialOrder) -> None:
    os.nice(TRIAL_NICENESS)
    limit_memory(order.memory_bytes)
    hard_s = math.ceil(order.cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (hard_s, hard_s))  # should the timer fail
    signal.setitimer(signal.ITIMER_PROF, order.cpu_s)  # the default action of its signal ends the process
    signal.setitimer(signal.ITIMER_REAL, order.wall_s)
    begin_bytes, begin_s, refusal = _resident_bytes(), time.process_time(), ""
    try:
        compiler.compile(order.guide)
    except GrammarRefused as exc:
        refusal = str(exc)
    used_s = time.process_time() - begin_s
    signal.setitimer(signal.ITIMER_PROF, 0)
    send_frame(link, TrialReport(refusal, used_s, max(0, _resident_bytes() - begin_bytes)))


# ── stepping ──


class _Stepper:
    """Steps the grammars of requests. One thread answers steps, another one compiles beside it."""

    def __init__(
        self, link: socket.socket, compiler: GrammarCompiler, order: StepperOrder, mask_fd: int, compile_fd: int
    ) -> None:
        self._link, self._compiler, self._step_cpu_s = link, compiler, order.step_cpu_s
        self._compile_link = socket.socket(fileno=compile_fd)
        self._masks = MaskBuffer(order.num_words, mask_fd)
        self._grammars: dict[int, LLMatcher] = {}
        self._states: dict[int, GrammarState] = {}
        self._refusals: dict[int, str] = {}  # by grammar
        self._excess_s: dict[int, float] = {}  # by state
        limit_memory(order.memory_bytes)

    def serve(self) -> None:
        """Until the core closes the link."""
        threading.Thread(target=self._compile_beside, name="grammar-compile", daemon=True).start()
        while True:
            order = receive_frame(self._link, StepOrder)
            self._free(order)
            for grammar in order.grammars:
                self._compile_again(grammar)
            self._masks.reserve(len(order.rows))
            problems = [(i, problem) for i, row in enumerate(order.rows) if (problem := self._step(i, row))]
            send_frame(self._link, StepReport(problems))

    def _free(self, order: StepOrder) -> None:
        for state_id in order.freed_state_ids:
            self._states.pop(state_id, None)
            self._excess_s.pop(state_id, None)
        for grammar_id in order.freed_grammar_ids:
            self._grammars.pop(grammar_id, None)

    def _compile_again(self, grammar: PrepareOrder) -> None:
        """For a step, after a restart: its requests go on."""
        self._masks.mark_grammar(grammar.grammar_id, beside=False)
        signal.setitimer(signal.ITIMER_PROF, self._step_cpu_s)
        try:
            self._grammars[grammar.grammar_id] = self._compiler.compile(grammar.guide)
        except GrammarRefused as exc:
            self._refusals[grammar.grammar_id] = str(exc)
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._masks.mark_grammar(0, beside=False)

    def _step(self, index: int, row: StepRow) -> str:
        """Take one row's tokens and write its mask. Returns why the request cannot go on, or ""."""
        if row.grammar_id in self._refusals:
            return self._refusals[row.grammar_id]
        self._begin(row.state_id)
        if row.is_new:
            self._states[row.state_id] = GrammarState(self._grammars[row.grammar_id].deep_copy())
        state = self._states[row.state_id]
        for begin in range(0, len(row.token_ids) - 1, TOKENS_AT_ONCE):
            end = min(begin + TOKENS_AT_ONCE, len(row.token_ids) - 1)
            state.take(row.token_ids[begin:end])
            self._begin(row.state_id)
        begin_s = time.thread_time()
        state.take(row.token_ids[-1:])
        state.write(self._masks.row_address(index), self._masks.row_bytes)
        spent_s = time.thread_time() - begin_s
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._masks.mark_state(0)
        if spent_s > FREE_ROW_S:
            excess_s = self._excess_s[row.state_id] = self._excess_s.get(row.state_id, 0.0) + spent_s - FREE_ROW_S
            if spent_s > MAX_ROW_S or excess_s > MAX_EXCESS_S:
                state.problem = state.problem or TOO_COSTLY
        return state.problem

    def _begin(self, state_id: int) -> None:
        """Mark the operation, and let it have its processor time. The signal's default action ends the process."""
        self._masks.mark_state(state_id)
        signal.setitimer(signal.ITIMER_PROF, self._step_cpu_s)

    def _compile_beside(self) -> None:
        try:
            while True:
                order = receive_frame(self._compile_link, PrepareOrder)
                self._masks.mark_grammar(order.grammar_id, beside=True)
                begin_s, refusal = time.thread_time(), ""
                try:
                    self._grammars[order.grammar_id] = self._compiler.compile(order.guide)
                except GrammarRefused as exc:
                    refusal = str(exc)
                self._masks.mark_grammar(0, beside=True)
                send_frame(self._compile_link, PrepareReport(refusal, time.thread_time() - begin_s))
        except EOFError:
            os._exit(0)
        except BaseException:
            os._exit(EXIT_CRASHED)
