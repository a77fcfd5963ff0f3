"""Forked grammar processes: a trial compiles one grammar within hard limits; a stepper steps accepted ones.

The kernel enforces the limits: processor time by a profiling timer, wall time by a real timer, memory by the size of
the address space. A signal ends a child that reaches one, even in native code.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from functools import partial
from typing import NoReturn

from llguidance import LLMatcher

from moiety_engine.structured_outputs.compiler import GrammarCompiler, largest_bytes
from moiety_engine.structured_outputs.costly_parts import too_costly
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.frames import (
    ChildOrder,
    PrepareOrder,
    PrepareReport,
    StepOrder,
    StepperOrder,
    StepReport,
    StepRow,
    TrialOrder,
    TrialReport,
)
from moiety_engine.structured_outputs.mask_buffer import MaskBuffer
from moiety_engine.structured_outputs.state import TOO_COSTLY, GrammarState
from moiety_limited_processes.child_limits import limit_memory, limit_time, resident_bytes, run_to_exit
from moiety_limited_processes.frames import (
    EXIT_CRASHED,
    receive_frame,
    receive_frame_with_fds,
    send_frame,
)
from moiety_wire.grammars import GrammarSpec

TRIAL_NICENESS = 5  # compilations yield to the model's steps
MAX_ROW_S = 0.25  # processor time of one mask; a slower grammar delays too many requests
FREE_ROW_S = 0.02  # processor time of one mask that is free for a request; time beyond it adds up,
MAX_EXCESS_S = 2.0  # to at most this


def run_child(link: socket.socket, compiler: GrammarCompiler) -> NoReturn:
    """Run the role of the first frame, and end the process."""
    run_to_exit(partial(_run_role, link, compiler))


def _run_role(link: socket.socket, compiler: GrammarCompiler) -> None:
    order, fds = receive_frame_with_fds(link, ChildOrder)
    if isinstance(order.role, TrialOrder):
        _run_trial(link, compiler, order.role)
    else:
        _Stepper(link, compiler, order.role, *fds).serve()


# ── trial ──


def _run_trial(link: socket.socket, compiler: GrammarCompiler, order: TrialOrder) -> None:
    os.nice(TRIAL_NICENESS)
    limit_memory(order.memory_bytes)
    limit_time(order.cpu_s, order.wall_s)
    begin_bytes, begin_s, refusal, spec = resident_bytes(), time.process_time(), "", order.spec
    try:
        spec = compiler.try_grammar(spec)
    except GrammarRefused as exc:
        refusal = str(exc)
    used_s = time.process_time() - begin_s
    signal.setitimer(signal.ITIMER_PROF, 0)
    send_frame(link, TrialReport(refusal, used_s, max(0, resident_bytes() - begin_bytes), spec))


# ── stepping ──


class _Stepper:
    """Stepper of requests' grammars. One thread answers steps, another one compiles beside it."""

    def __init__(
        self, link: socket.socket, compiler: GrammarCompiler, order: StepperOrder, mask_fd: int, compile_fd: int
    ) -> None:
        self._link, self._compiler, self._step_cpu_s = link, compiler, order.step_cpu_s
        self._compile_link = socket.socket(fileno=compile_fd)
        self._masks = MaskBuffer(order.num_words, mask_fd)
        self._grammars: dict[int, tuple[GrammarSpec, LLMatcher]] = {}
        self._states: dict[int, GrammarState] = {}
        self._refusals: dict[int, str] = {}  # by grammar
        self._specs: dict[int, GrammarSpec] = {}  # by state
        self._excess_s: dict[int, float] = {}  # by state
        self._larger_bytes: dict[int, int] = {}  # at most, of the lexers of states with a long answer
        self._max_larger_bytes = order.memory_bytes // 2
        limit_memory(order.memory_bytes)

    def serve(self) -> None:
        """Serve steps until the core closes the link."""
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
            self._specs.pop(state_id, None)
            self._excess_s.pop(state_id, None)
            self._larger_bytes.pop(state_id, None)
        for grammar_id in order.freed_grammar_ids:
            self._grammars.pop(grammar_id, None)

    def _compile_again(self, grammar: PrepareOrder) -> None:
        """Compile a grammar again after a restart, so that its requests continue."""
        self._masks.mark_grammar(grammar.grammar_id, beside=False)
        signal.setitimer(signal.ITIMER_PROF, self._step_cpu_s)
        try:
            self._grammars[grammar.grammar_id] = (grammar.spec, self._compiler.compile(grammar.spec))
        except GrammarRefused as exc:
            self._refusals[grammar.grammar_id] = str(exc)
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._masks.mark_grammar(0, beside=False)

    def _step(self, index: int, row: StepRow) -> str:
        """Accept one row's tokens and write its mask. Returns why the request cannot continue, or ""."""
        if row.grammar_id in self._refusals:
            return self._refusals[row.grammar_id]
        self._begin(row.state_id)
        if row.is_new:
            self._states[row.state_id] = self._new_state(row)
        state = self._states[row.state_id]
        state.take(row.token_ids[:-1])
        self._begin(row.state_id)
        begin_s, reread_s = time.thread_time(), state.reread_s
        state.take(row.token_ids[-1:])
        state.write(self._masks.row_address(index), self._masks.row_bytes)
        spent_s = time.thread_time() - begin_s - (state.reread_s - reread_s)
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._masks.mark_state(0)
        if spent_s > FREE_ROW_S:
            excess_s = self._excess_s[row.state_id] = self._excess_s.get(row.state_id, 0.0) + spent_s - FREE_ROW_S
            if spent_s > MAX_ROW_S or excess_s > MAX_EXCESS_S:
                state.problem = state.problem or TOO_COSTLY
        return too_costly(self._specs[row.state_id]) if state.problem == TOO_COSTLY else state.problem

    def _new_state(self, row: StepRow) -> GrammarState:
        spec, matcher = self._grammars[row.grammar_id]
        self._specs[row.state_id] = spec
        return GrammarState(
            matcher.deep_copy(), partial(self._enlarge, row.state_id, spec), partial(self._begin, row.state_id)
        )

    def _enlarge(self, state_id: int, spec: GrammarSpec, size: int) -> LLMatcher | None:
        """Return a matcher with a larger lexer for a long answer; None where there is none, or no memory for it."""
        self._begin(state_id)
        num_bytes = largest_bytes(size)
        if self._larger_bytes_total(state_id) + num_bytes > self._max_larger_bytes:
            return None
        self._larger_bytes[state_id] = num_bytes
        return self._compiler.compile_larger(spec, size)

    def _larger_bytes_total(self, besides: int) -> int:
        return sum(num for state_id, num in self._larger_bytes.items() if state_id != besides)

    def _begin(self, state_id: int) -> None:
        """Mark the operation and start its processor-time limit. The signal's default action ends the process."""
        self._masks.mark_state(state_id)
        signal.setitimer(signal.ITIMER_PROF, self._step_cpu_s)

    def _compile_beside(self) -> None:
        try:
            while True:
                order = receive_frame(self._compile_link, PrepareOrder)
                self._masks.mark_grammar(order.grammar_id, beside=True)
                begin_s, refusal = time.thread_time(), ""
                try:
                    self._grammars[order.grammar_id] = (order.spec, self._compiler.compile(order.spec))
                except GrammarRefused as exc:
                    refusal = str(exc)
                self._masks.mark_grammar(0, beside=True)
                send_frame(self._compile_link, PrepareReport(refusal, time.thread_time() - begin_s))
        except EOFError:
            os._exit(0)
        except BaseException:
            os._exit(EXIT_CRASHED)
