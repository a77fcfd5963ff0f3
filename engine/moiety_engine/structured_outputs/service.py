"""Service that compiles and steps grammars in separate processes, and caches which grammars are accepted or refused.

A grammar is first compiled in a trial, a process with hard limits that ends with it. An accepted grammar is compiled
again in the process that steps it. A refusal is cached, so that repeating the grammar costs nothing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec
import structlog

from moiety_engine.config import GrammarLimits
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.frames import TrialOrder, TrialReport
from moiety_engine.structured_outputs.grammar_template import GrammarTemplate, send_role
from moiety_engine.structured_outputs.preferred_schemas import (
    num_unsupported,
    prefer_schemas,
    tools_with_preference,
)
from moiety_engine.structured_outputs.stepping import (
    MAX_KEPT,
    MAX_KEPT_BYTES,
    MAX_REPORT_BYTES,
    MAX_WORKERS,
    CheckedGrammar,
    GrammarHandle,
    SteppingWorker,
)
from moiety_limited_processes.errors import WorkerFailed
from moiety_limited_processes.frames import ChildExit, receive_frame
from moiety_limited_processes.processes import ProcessLimit, describe_end, name_of, reached_limit
from moiety_wire.grammars import GrammarSpec

log = structlog.get_logger()

REQUESTS_A_WORKER = 8  # fewer do not justify another worker
MAX_VERDICTS = 4096  # cached refusals
MAX_CRASHES = 2  # deaths of stepping processes by one grammar, after which it is refused
MAX_TRIALS = 3  # trials of one grammar that were killed from outside


class GrammarService:
    """Owner of the grammar processes of one replica. Thread-safe. They end with `close` or with the object."""

    def __init__(self, folder: Path, limits: GrammarLimits) -> None:
        """Start the grammar processes.

        `folder`: the checkpoint, for its tokenizer.

        Raises ValueError where the tokenizer does not support grammars, and WorkerFailed where no process
        starts.
        """
        self._limits = limits
        self._template = GrammarTemplate(folder)
        self._lock = threading.Lock()
        self._refusals: OrderedDict[bytes, str] = OrderedDict()  # by the grammar's hash
        self._accepted: OrderedDict[GrammarSpec, CheckedGrammar] = OrderedDict()
        self._crashes: OrderedDict[GrammarSpec, int] = OrderedDict()
        self._chosen: OrderedDict[bytes, CheckedGrammar] = OrderedDict()  # for grammars with preferred schemas
        num_workers = max(1, min(MAX_WORKERS, (os.cpu_count() or 1) // 2))
        note_crash = _weak_method(self)
        self._workers = [SteppingWorker(self._template, limits, note_crash) for _ in range(num_workers)]
        self._close = weakref.finalize(self, _close_all, self._workers, self._template)
        self.compile_seconds_total = 0.0  # processor time of compilations, including refused ones

    @property
    def num_words(self) -> int:
        """Number of 32-bit words in a mask."""
        return self._template.num_words

    @property
    def restarts_total(self) -> int:
        """Restarts of stepping processes and of their template."""
        return self._template.restarts_total + sum(worker.restarts_total for worker in self._workers)

    def refusal_of(self, spec: GrammarSpec) -> str:
        """Return why this grammar was refused before; "" if it was not."""
        return self._refusals.get(_digest(self._stepped(spec)[0]), "")

    def open(self, spec: GrammarSpec) -> GrammarHandle | None:
        """Return a handle for one request; None if the grammar must be compiled first."""
        spec, fallback = self._stepped(spec)
        with self._lock:
            grammar = self._accepted.get(spec)
            if grammar is None:
                return None
            self._accepted.move_to_end(spec)
        worker = self._choose()
        return worker.open(grammar._replace(fallback=fallback)) if worker.has(spec) else None

    def compile(self, spec: GrammarSpec) -> tuple[CheckedGrammar, SteppingWorker]:
        """Compile a grammar in a worker that can step it for later requests, and wait for it.

        Preferred schemas that are not supported are left out. Raises GrammarRefused, WorkerFailed.
        """
        spec, fallback = self._stepped(spec)
        if refusal := self.refusal_of(spec):
            raise GrammarRefused(refusal)
        with self._lock:
            grammar = self._accepted.get(spec)
        if grammar is None:
            grammar = self._try_preferred(spec) if tools_with_preference(spec) else self._try(spec)
            fallback = fallback or grammar.fallback
            with self._lock:
                self._accepted[grammar.spec] = grammar._replace(fallback=None)  # strict tools share it
                self._forget_oldest()
        worker = self._choose()
        self._count(worker.prepare(grammar))
        return grammar._replace(fallback=fallback), worker

    def remember_refusal(self, spec: GrammarSpec, refusal: str) -> None:
        """Refuse the grammar from now on without compiling it."""
        with self._lock:
            self._accepted.pop(spec, None)
            self._refusals[_digest(spec)] = refusal
            if len(self._refusals) > MAX_VERDICTS:
                self._refusals.popitem(last=False)

    def note_crash(self, spec: GrammarSpec, problem: str) -> None:
        """Note that a stepping process died of a grammar that had passed its trial.

        The first crash may depend on the request's tokens; after a second one, the grammar is refused.
        """
        with self._lock:
            crashes = self._crashes.pop(spec, 0) + 1
            self._crashes[spec] = crashes
            if len(self._crashes) > MAX_KEPT:
                self._crashes.popitem(last=False)
        if crashes >= MAX_CRASHES:
            self.remember_refusal(spec, problem)

    def close(self) -> None:
        """End all processes. Calls in progress raise WorkerFailed."""
        self._close()

    def _choose(self) -> SteppingWorker:
        """Return the first worker with few requests; otherwise the one with the fewest.

        So few processes run where one is enough.
        """
        for worker in self._workers:
            if worker.num_open < REQUESTS_A_WORKER:
                return worker
        return min(self._workers, key=lambda worker: worker.num_open)

    def _stepped(self, spec: GrammarSpec) -> tuple[GrammarSpec, GrammarSpec | None]:
        """Return the grammar that is stepped for requests with `spec`, and its fallback.

        They differ from `spec` where it has preferred schemas and has been compiled.
        """
        chosen = self._chosen.get(_digest(spec)) if self._chosen else None
        if chosen is None:
            return spec, None
        if chosen.fallback is not None and _digest(chosen.spec) in self._refusals:
            return chosen.fallback, None
        return chosen.spec, chosen.fallback

    def _try_preferred(self, spec: GrammarSpec) -> CheckedGrammar:
        """Compile in a trial process, without preferred schemas if the trial does not end within its limits.

        Raises GrammarRefused, WorkerFailed.
        """
        without = prefer_schemas(spec, ())
        try:
            grammar = chosen = self._try(spec)
            if chosen.spec != without:
                grammar = chosen = chosen._replace(fallback=without)
        except GrammarRefused:
            grammar, chosen = None, CheckedGrammar(without, 0)
        if num := num_unsupported(spec, chosen.spec):
            log.info("tool_schemas_not_enforced", num_tools=num, kind=str(spec.kind), bytes=len(spec.text))
        with self._lock:
            self._refusals.pop(_digest(spec), None)
            self._chosen[_digest(spec)] = chosen
            num_bytes = sum(len(one.spec.text) for one in self._chosen.values())
            while len(self._chosen) > 1 and (len(self._chosen) > MAX_KEPT or num_bytes > MAX_KEPT_BYTES):
                num_bytes -= len(self._chosen.popitem(last=False)[1].spec.text)
        return self._try(without) if grammar is None else grammar

    def _try(self, spec: GrammarSpec) -> CheckedGrammar:
        """Compile in a trial process.

        Raises GrammarRefused, WorkerFailed.
        """
        limits = self._limits
        order = TrialOrder(spec, limits.compile_cpu_s, limits.compile_wall_s, limits.compile_memory_bytes)
        max_bytes = 2 * len(msgspec.msgpack.encode(spec)) + MAX_REPORT_BYTES
        for _ in range(MAX_TRIALS):
            template_pid = self._template.pid
            deadline_s = time.monotonic() + limits.compile_wall_s + 2
            with self._template.fork() as child:
                child.link.settimeout(limits.compile_wall_s + 2)
                try:
                    send_role(child, order)
                    report = receive_frame(child.link, TrialReport, deadline_s=deadline_s, max_bytes=max_bytes)
                except (EOFError, OSError):
                    end = child.kill()
                    if end is None:
                        self._template.restart(template_pid)
                        continue
                    self._count(end.cpu_s)
                    if not _was_killed(end):
                        raise self._refuse(spec, end) from None
                    continue
            self._count(report.cpu_s)
            if report.refusal:
                self.remember_refusal(spec, report.refusal)
                raise GrammarRefused(report.refusal)
            return CheckedGrammar(report.spec, report.memory_bytes)
        raise GrammarRefused("the process that compiled the grammar was killed; send the request again")

    def _refuse(self, spec: GrammarSpec, end: ChildExit) -> GrammarRefused:
        """Return the error for the client after a trial ended abnormally."""
        limits = self._limits
        if reached_limit(end) is ProcessLimit.WALL_TIME:  # depends on the machine's other load
            return GrammarRefused(f"compiling the grammar took more than {limits.compile_wall_s:g} s; simplify it")
        took = describe_end(
            end,
            cpu_time=f"takes more than {limits.compile_cpu_s:g} s of CPU time; simplify it",
            memory=f"takes more than {limits.compile_memory_bytes >> 20:,} MiB; simplify it",
            crash=f"crashed the compiler ({name_of(end)}); rewrite it",
        )
        problem = f"compiling the grammar {took}"
        log.warning("grammar_refused", ended_by=name_of(end), kind=str(spec.kind), bytes=len(spec.text))
        self.remember_refusal(spec, problem)
        return GrammarRefused(problem)

    def _count(self, cpu_s: float) -> None:
        with self._lock:
            self.compile_seconds_total += cpu_s

    def _forget_oldest(self) -> None:
        num_bytes = sum(len(spec.text) for spec in self._accepted)
        while len(self._accepted) > MAX_KEPT or num_bytes > MAX_KEPT_BYTES:
            spec, _ = self._accepted.popitem(last=False)
            num_bytes -= len(spec.text)


class GrammarServiceStart:
    """Start of a service beside other work, since large vocabularies take a second."""

    def __init__(self, folder: Path, limits: GrammarLimits) -> None:
        self._found: GrammarService | str = ""
        self._thread = threading.Thread(target=self._start, args=(folder, limits), name="grammar-start", daemon=True)
        self._thread.start()

    def result(self) -> GrammarService | str:
        """Return the service, or the reason why there is none."""
        self._thread.join()
        if isinstance(self._found, str):
            log.warning(
                "structured_outputs_unavailable",
                reason=self._found,
                advice="correct the cause and restart the engine; until then requests with a grammar are refused",
            )
        return self._found

    def _start(self, folder: Path, limits: GrammarLimits) -> None:
        try:
            self._found = GrammarService(folder, limits)
        except (ValueError, WorkerFailed) as exc:
            self._found = str(exc)


def _was_killed(end: ChildExit) -> bool:
    """Return whether a process was killed from outside: by the operator, or for lack of memory."""
    return os.WIFSIGNALED(end.status) and os.WTERMSIG(end.status) in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)


def _digest(spec: GrammarSpec) -> bytes:
    return blake2b(f"{spec.kind}\0{spec.text}".encode(errors="surrogatepass"), digest_size=16).digest()


def _close_all(workers: Sequence[SteppingWorker], template: GrammarTemplate) -> None:
    for worker in workers:
        worker.close()
    template.close()


def _weak_method(service: GrammarService) -> Callable[[GrammarSpec, str], None]:
    """Return `note_crash` without keeping the service alive."""
    method = weakref.WeakMethod(service.note_crash)

    def note(spec: GrammarSpec, problem: str) -> None:
        found = method()
        if found is not None:
            found(spec, problem)

    return note
