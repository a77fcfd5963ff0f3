"""The core's client of a stepping process: one round trip per step, restarts, and fault attribution.

This side has everything that a request's grammar needs to continue: its source and the tokens of its answer. When the
process dies, a new one gets both for each request; other requests only notice the delay. A request fails if the process
died by its own fault during the request's operation.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from moiety_engine.config import GrammarLimits
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.frames import (
    PrepareOrder,
    PrepareReport,
    StepOrder,
    StepperOrder,
    StepReport,
    StepRow,
)
from moiety_engine.structured_outputs.grammar_template import GrammarTemplate, send_role
from moiety_engine.structured_outputs.mask_buffer import MaskBuffer
from moiety_limited_processes.errors import WorkerFailed
from moiety_limited_processes.frames import ChildExit, receive_frame, send_frame
from moiety_limited_processes.processes import WorkerChild, is_own_fault, name_of
from moiety_wire.grammars import GrammarSpec
from moiety_wire.messages import FailureCode

log = structlog.get_logger()

MAX_WORKERS = 4  # processes that step the grammars of one replica
MAX_KEPT = 256  # grammars in one process
MAX_KEPT_BYTES = 8 << 20  # of their text
STALL_S = 5.0  # without a finished operation, after which a process counts as stopped
MAX_REPORT_BYTES = 1 << 16  # of the report about a grammar
MAX_ROW_REPORT_BYTES = 4096  # of the report about each row of a step
REPORT_S = 0.5  # time for the template to report a process's end; steps wait meanwhile
UNKNOWN_END = 0.5  # share of a death that the template did not report: it was killed itself or is late
MAX_DEATHS = 2  # deaths of processes during a request's operation, without proof of its fault, after which it fails
MAX_UNEXPLAINED = 3  # deaths within one step that no request caused
CRASHED = "the grammar crashed its worker process ({how}); rewrite it"
NOT_COMPILED = "the grammar could not be compiled because of an error in the engine; send the request again"
NOT_RUNNING = "the engine's grammar processes do not run ({reason}); send the request again"

_ids = itertools.count(1)


class CheckedGrammar(NamedTuple):
    """A grammar that compiled within its limits. `fallback` replaces it in an answer that cannot continue with it."""

    spec: GrammarSpec
    memory_bytes: int
    fallback: GrammarSpec | None = None  # the same without preferred schemas, which needs no more memory


class GrammarHandle:
    """Grammar of one request. Created by the thread that queues requests, then used by one thread at a time."""

    __slots__ = ("__weakref__", "accepted_ids", "code", "grammar", "num_deaths", "problem", "state_id", "worker")

    def __init__(self, grammar: CheckedGrammar, worker: SteppingWorker, freed_ids: deque[int]) -> None:
        """Create the handle. `freed_ids` gets its `state_id` when the handle is garbage collected."""
        self.grammar, self.worker = grammar, worker
        self.state_id = next(_ids)
        self.accepted_ids: list[int] = []  # tokens of the answer
        self.problem, self.code = "", FailureCode.GRAMMAR_REFUSED  # why it cannot continue, for the client
        self.num_deaths = 0.0  # deaths of processes during its operations, without proof of its fault
        weakref.finalize(self, freed_ids.append, self.state_id).atexit = False

    @property
    def num_taken(self) -> int:
        """Number of the answer's tokens taken."""
        return len(self.accepted_ids)

    def take(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens of the answer; the process receives them with the next step."""
        self.accepted_ids += token_ids

    def fail(self, problem: str, code: FailureCode = FailureCode.GRAMMAR_REFUSED) -> None:
        """Set why the request cannot continue. The first reason is kept."""
        if not self.problem:
            self.problem, self.code = problem, code

    def fall_back_or_fail(self, problem: str) -> None:
        """Continue with the grammar's fallback, in a new state; where there is none, fail."""
        fallback = self.grammar.fallback
        if fallback is None:
            self.fail(problem)
        else:
            self.grammar, self.num_deaths = CheckedGrammar(fallback, self.grammar.memory_bytes), 0.0


class _Kept(NamedTuple):
    grammar_id: int
    memory_bytes: int
    text_bytes: int


class _Process:
    """One process, from its start to its death. `has` is guarded by the worker's lock."""

    def __init__(self, template: GrammarTemplate, limits: GrammarLimits) -> None:
        self.child: WorkerChild = template.fork()
        self.masks = MaskBuffer(template.num_words)
        self.compile_link, its_compile_link = socket.socketpair()
        self.prepare_lock = threading.Lock()  # one round trip at a time
        self.has: OrderedDict[GrammarSpec, _Kept] = OrderedDict()
        self.freed_grammar_ids: list[int] = []
        self.num_sent: dict[int, int] = {}  # tokens that each state in it has taken
        self.end: ChildExit | None = None
        order = StepperOrder(limits.worker_memory_bytes, limits.compile_cpu_s + 1, template.num_words)
        self.child.link.settimeout(STALL_S)
        self.compile_link.settimeout(4 * limits.compile_wall_s + STALL_S)
        with its_compile_link:
            try:
                send_role(self.child, order, (self.masks.fd, its_compile_link.fileno()))
            except OSError:
                self.close()
                raise

    def close(self) -> None:
        self.child.close()
        self.compile_link.close()
        self.masks.close()


class SteppingWorker:
    """A stepping process and its successors.

    `open` and `has` are for the thread that queues requests, `prepare` for compiling threads, `step` for one thread at
    a time.
    """

    def __init__(
        self, template: GrammarTemplate, limits: GrammarLimits, note_crash: Callable[[GrammarSpec, str], None]
    ) -> None:
        """Create the worker. `note_crash` is called with a grammar that crashed the process."""
        self._template, self._limits, self._note_crash = template, limits, note_crash
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._is_closed = False
        self._freed_ids: deque[int] = deque()
        self._num_opened = self._num_freed = 0
        self.restarts_total = 0

    @property
    def num_open(self) -> int:
        """Number of requests whose grammars the worker steps."""
        return self._num_opened - self._num_freed - len(self._freed_ids)

    def has(self, spec: GrammarSpec) -> bool:
        """Return whether a request with this grammar can start at once."""
        process = self._process
        return process is not None and spec in process.has

    def open(self, grammar: CheckedGrammar) -> GrammarHandle:
        self._num_opened += 1
        return GrammarHandle(grammar, self, self._freed_ids)

    def prepare(self, grammar: CheckedGrammar) -> float:
        """Compile the grammar beside the steps; return the processor time in seconds.

        Raises GrammarRefused, WorkerFailed.
        """
        for _ in range(MAX_UNEXPLAINED):
            process = self._running()
            with process.prepare_lock:
                if self.has(grammar.spec):
                    return 0.0
                order = PrepareOrder(next(_ids), grammar.spec)
                try:
                    send_frame(process.compile_link, order)
                    deadline_s = time.monotonic() + 4 * self._limits.compile_wall_s + STALL_S
                    report = receive_frame(
                        process.compile_link, PrepareReport, deadline_s=deadline_s, max_bytes=MAX_REPORT_BYTES
                    )
                except (EOFError, OSError):
                    end = self._end_process(process)
                    if end is not None and is_own_fault(end) and order.grammar_id in process.masks.grammars_in_progress:
                        raise self._crash_refusal(grammar.spec, end) from None
                    continue
                if report.refusal:
                    raise GrammarRefused(report.refusal)
                with self._lock:
                    self._keep(process, grammar, order.grammar_id)
                return report.cpu_s
        raise WorkerFailed("grammar processes end as soon as they start")

    def step(self, handles: Sequence[GrammarHandle]) -> tuple[memoryview, Sequence[int]]:
        """Accept each handle's new tokens and write its mask.

        Returns the masks, one after the other, which stay valid until the next call, and each handle's index among
        them; -1 where it has a problem.
        """
        num_unexplained = 0
        while live := [handle for handle in handles if not handle.problem]:
            try:
                process = self._running()
            except WorkerFailed as exc:
                self._give_up(live, str(exc))
                break
            try:
                report = self._ask(process, live)
            except (EOFError, OSError):
                num_unexplained += not self._record_crash(process, live)
                if num_unexplained >= MAX_UNEXPLAINED:
                    self._give_up(live, "they end unexpectedly")
                continue
            for handle in live:
                process.num_sent[handle.state_id] = handle.num_taken
            if self._fail(process, [(live[index], problem) for index, problem in report.problems]):
                continue
            masks = process.masks.rows(len(live))
            if len(live) == len(handles) and not report.problems:
                return masks, range(len(handles))
            places = {handle.state_id: i for i, handle in enumerate(live) if not handle.problem}
            return masks, [places.get(handle.state_id, -1) for handle in handles]
        return memoryview(b""), [-1] * len(handles)

    def close(self) -> None:
        """End the process. Calls in progress fail."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.close()
                self._process = None

    @staticmethod
    def _fail(process: _Process, problems: Sequence[tuple[GrammarHandle, str]]) -> bool:
        """Fail requests; return whether some of them continue with another grammar, in a new state."""
        fallen_back = False
        for handle, problem in problems:
            handle.fall_back_or_fail(problem)
            if not handle.problem:
                fallen_back = True
                del process.num_sent[handle.state_id]
        return fallen_back

    def _running(self) -> _Process:
        with self._lock:
            if self._is_closed:
                raise WorkerFailed("the engine is shutting down")
            for _ in range(MAX_UNEXPLAINED):
                if self._process is not None:
                    return self._process
                try:
                    self._process = _Process(self._template, self._limits)
                except OSError:
                    self._template.restart(self._template.pid)
            raise WorkerFailed("grammar processes do not start")

    def _ask(self, process: _Process, live: Sequence[GrammarHandle]) -> StepReport:
        order = self._order(process, live)
        process.masks.reserve(len(live))
        send_frame(process.child.link, order)
        num_operations = -1
        while not process.child.wait_readable(STALL_S):
            if process.masks.operations_total == num_operations:
                raise TimeoutError("no operation ended")
            num_operations = process.masks.operations_total
        deadline_s, max_bytes = time.monotonic() + STALL_S, (len(live) + 1) * MAX_ROW_REPORT_BYTES
        return receive_frame(process.child.link, StepReport, deadline_s=deadline_s, max_bytes=max_bytes)

    def _order(self, process: _Process, live: Sequence[GrammarHandle]) -> StepOrder:
        rows, grammars = [], []
        with self._lock:
            freed_ids = [self._freed_ids.popleft() for _ in range(len(self._freed_ids))]
            self._num_freed += len(freed_ids)
            for handle in live:
                num_sent = process.num_sent.get(handle.state_id)
                grammar_id = 0
                if num_sent is None:
                    kept = process.has.get(handle.grammar.spec)
                    if kept is None:
                        kept = self._keep(process, handle.grammar, next(_ids))
                        grammars.append(PrepareOrder(kept.grammar_id, handle.grammar.spec))
                    grammar_id = kept.grammar_id
                fresh_ids = handle.accepted_ids[num_sent or 0 :]
                rows.append(StepRow(handle.state_id, grammar_id, fresh_ids, num_sent is None))
            freed_grammar_ids, process.freed_grammar_ids = process.freed_grammar_ids, []
        freed_ids = [state_id for state_id in freed_ids if process.num_sent.pop(state_id, None) is not None]
        new_ids = {grammar.grammar_id for grammar in grammars}
        return StepOrder(rows, grammars, freed_ids, [one for one in freed_grammar_ids if one not in new_ids])

    def _keep(self, process: _Process, grammar: CheckedGrammar, grammar_id: int) -> _Kept:
        """Record that the process has a grammar, and which ones it must drop for it. The caller holds the lock."""
        kept = process.has[grammar.spec] = _Kept(grammar_id, grammar.memory_bytes, len(grammar.spec.text))
        while len(process.has) > 1 and (
            len(process.has) > MAX_KEPT
            or sum(one.text_bytes for one in process.has.values()) > MAX_KEPT_BYTES
            or sum(one.memory_bytes for one in process.has.values()) > self._limits.worker_memory_bytes // 2
        ):
            _, dropped = process.has.popitem(last=False)
            process.freed_grammar_ids.append(dropped.grammar_id)
        return kept

    def _end_process(self, process: _Process) -> ChildExit | None:
        """End a process that does not answer; the next call starts another one. Returns how it ended, if known."""
        with self._lock:
            if self._process is process:
                self._process = None
                self.restarts_total += 1
                process.end = process.child.kill(REPORT_S)
                process.close()
                how = "unknown" if process.end is None else name_of(process.end)
                log.warning("grammar_worker_restarted", ended_by=how, restarts_total=self.restarts_total)
            return process.end

    def _record_crash(self, process: _Process, live: Sequence[GrammarHandle]) -> bool:
        """Find the request in whose operation the process died. Returns False where there was none."""
        end = self._end_process(process)
        masks = process.masks
        compiling, beside = masks.grammars_in_progress
        crashed = []
        for handle in live:
            kept = process.has.get(handle.grammar.spec)
            is_compiled = bool(compiling) and kept is not None and kept.grammar_id == compiling
            if is_compiled or handle.state_id == masks.state_in_progress:
                crashed.append(handle)
        is_proved = end is not None and is_own_fault(end) and not beside
        for handle in crashed:
            handle.num_deaths += UNKNOWN_END if end is None else 1
            if end is not None and (is_proved or handle.num_deaths >= MAX_DEATHS):
                handle.fall_back_or_fail(str(self._crash_refusal(handle.grammar.spec, end)))
            elif handle.num_deaths >= MAX_DEATHS:
                handle.fall_back_or_fail(CRASHED.format(how="it ended repeatedly"))
        return bool(crashed)

    def _crash_refusal(self, spec: GrammarSpec, end: ChildExit) -> GrammarRefused:
        problem = CRASHED.format(how=name_of(end))
        if is_own_fault(end):
            self._note_crash(spec, problem)
        return GrammarRefused(problem)

    @staticmethod
    def _give_up(live: Sequence[GrammarHandle], reason: str) -> None:
        for handle in live:
            handle.fail(NOT_RUNNING.format(reason=reason), FailureCode.ENGINE_FAILED)
