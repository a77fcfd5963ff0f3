"""Queue of requests whose grammar is being compiled.

No other request waits for them, and no tenant waits long for another. Each tenant has a queue of grammars. One grammar
of a tenant is compiled at a time, and the tenant whose compilations have taken the least time goes first. So a tenant
with expensive grammars delays others by at most one compilation, which has a time limit.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog

from moiety_engine.config import GrammarLimits
from moiety_engine.messages import CoreFailure, CoreSubmit
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.service import GrammarService
from moiety_engine.structured_outputs.stepping import (
    NOT_COMPILED,
    NOT_RUNNING,
    CheckedGrammar,
    GrammarHandle,
    SteppingWorker,
)
from moiety_limited_processes.errors import WorkerFailed
from moiety_wire.grammars import GrammarSpec
from moiety_wire.messages import FailureCode
from moiety_wire.trace_events import Reason

log = structlog.get_logger()

NUM_COMPILERS = 2
MAX_ACCOUNTS = 1024  # idle tenants whose compilation times are remembered
RETRY_AFTER_S = 1.0
NOT_HELD_HERE = "structured outputs are not available on this engine: {reason}"
REFUSED = "the requested grammar is not supported: {reason}"
QUEUE_FULL = (
    "{num} grammars of this tenant are waiting to be compiled, which is the limit; send the request again later"
)


@dataclass(slots=True)
class _Tenant:
    """One tenant's waiting requests by grammar, in the order of arrival, and the time that its compilations took."""

    waiting: OrderedDict[GrammarSpec, list[CoreSubmit]] = field(default_factory=OrderedDict)
    used_s: float = 0.0
    is_compiling: bool = False


@dataclass(slots=True)
class _Compilation:
    tenant: _Tenant
    begin_s: float
    result: Future[tuple[CheckedGrammar, SteppingWorker]]


class GrammarCompileQueue:
    """Compile queue of one replica, used by the step loop's thread. Its own threads only wait for other processes."""

    def __init__(self, service: GrammarService | str, limits: GrammarLimits | None = None) -> None:
        """Create the queue. `service` is the grammar service, or the reason why there is none."""
        self._service = None if isinstance(service, str) else service
        self._reason = service if isinstance(service, str) else ""
        self._max_waiting = (limits or GrammarLimits()).max_waiting_per_tenant
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._places: dict[int, tuple[str, GrammarSpec]] = {}  # tenant and grammar of waiting requests, by key
        self._compilations: dict[GrammarSpec, _Compilation] = {}
        self._ready: deque[tuple[CoreSubmit, GrammarHandle]] = deque()
        self._refused: deque[CoreFailure] = deque()
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="grammars") if self._service else None

    @property
    def is_open(self) -> bool:
        return self._service is not None

    @property
    def num_words(self) -> int:
        """Number of 32-bit words in a mask; 0 where grammars are not available."""
        return 0 if self._service is None else self._service.num_words

    @property
    def num_waiting(self) -> int:
        """Number of grammars that wait to be compiled or are being compiled."""
        return sum(len(tenant.waiting) for tenant in self._tenants.values())

    def metrics(self) -> dict[str, float]:
        """Return fields of `LoadMetrics`."""
        if self._service is None:
            return {}
        return {
            "grammars_waiting": self.num_waiting,
            "grammar_compile_seconds_total": self._service.compile_seconds_total,
            "grammar_worker_restarts_total": self._service.restarts_total,
        }

    def add_request(self, submit: CoreSubmit) -> None:
        """Add a request that waits until its grammar is compiled or refused."""
        spec = submit.grammar
        assert spec is not None, "only requests with a grammar wait for its compilation"
        if self._service is None:
            self._refuse(submit.key, NOT_HELD_HERE.format(reason=self._reason))
        elif refusal := self._service.refusal_of(spec):
            self._refuse(submit.key, REFUSED.format(reason=refusal))
        elif (handle := self._service.open(spec)) is not None:
            self._ready.append((submit, handle))
        else:
            self._wait(submit, spec)

    def remove_request(self, key: int) -> CoreSubmit | None:
        """Remove a waiting request and return it; None if there is no such request."""
        for one in self._ready:
            if one[0].key == key:
                self._ready.remove(one)
                return one[0]
        tenant_id, spec = self._places.pop(key, ("", None))
        if spec is None:
            return None
        waiting = self._tenants[tenant_id].waiting
        (submit,) = [one for one in waiting[spec] if one.key == key]
        waiting[spec].remove(submit)
        if not waiting[spec]:
            del waiting[spec]
        return submit

    def take_ready(self) -> Iterator[tuple[CoreSubmit, GrammarHandle]]:
        """Yield the requests that need not wait any longer, with their grammars."""
        for spec in [spec for spec, one in self._compilations.items() if one.result.done()]:
            self._take_result(spec, self._compilations.pop(spec))
        self._compile_more()
        while self._ready:
            yield self._ready.popleft()

    def take_refused(self) -> list[CoreFailure]:
        refused = list(self._refused)
        self._refused.clear()
        return refused

    def close(self) -> None:
        """Stop the threads and the processes."""
        if self._service is not None and self._compilers is not None:
            self._compilers.shutdown(wait=False, cancel_futures=True)
            self._service.close()

    def _wait(self, submit: CoreSubmit, spec: GrammarSpec) -> None:
        tenant = self._tenants.setdefault(submit.tenant_id, _Tenant())
        if spec not in tenant.waiting and len(tenant.waiting) >= self._max_waiting:
            message = QUEUE_FULL.format(num=len(tenant.waiting))
            code, reason = FailureCode.OVERLOADED, Reason.TENANT_QUEUE_FULL
            self._refused.append(CoreFailure(submit.key, code, message, 0, reason, RETRY_AFTER_S))
            return
        if not tenant.waiting:  # a tenant gets no credit for the time in which it had no grammars
            busy = [other.used_s for other in self._tenants.values() if other.waiting]
            tenant.used_s = max(tenant.used_s, min(busy, default=0.0))
        self._tenants.move_to_end(submit.tenant_id)
        tenant.waiting.setdefault(spec, []).append(submit)
        self._places[submit.key] = submit.tenant_id, spec
        self._compile_more()

    def _compile_more(self) -> None:
        while len(self._compilations) < NUM_COMPILERS and (chosen := self._next()) is not None:
            assert self._service is not None and self._compilers is not None, (
                "no request waits for a grammar where grammars are not available"
            )
            tenant, spec = chosen
            tenant.is_compiling = True
            result = self._compilers.submit(self._service.compile, spec)
            self._compilations[spec] = _Compilation(tenant, time.monotonic(), result)

    def _next(self) -> tuple[_Tenant, GrammarSpec] | None:
        """Return the tenant with the least compilation time, and its oldest grammar that no other tenant compiles."""
        found: tuple[_Tenant, GrammarSpec] | None = None
        for tenant in self._tenants.values():
            if tenant.is_compiling or not tenant.waiting or (found is not None and found[0].used_s <= tenant.used_s):
                continue
            spec = next((spec for spec in tenant.waiting if spec not in self._compilations), None)
            if spec is not None:
                found = tenant, spec
        return found

    def _take_result(self, spec: GrammarSpec, compilation: _Compilation) -> None:
        compilation.tenant.is_compiling = False
        compilation.tenant.used_s += time.monotonic() - compilation.begin_s
        submits = [one for tenant in self._tenants.values() for one in tenant.waiting.pop(spec, ())]
        for submit in submits:
            del self._places[submit.key]
        self._forget_accounts()
        code = FailureCode.GRAMMAR_REFUSED
        try:
            grammar, worker = compilation.result.result()
        except GrammarRefused as exc:
            message = REFUSED.format(reason=exc)
        except WorkerFailed as exc:
            code, message = FailureCode.ENGINE_FAILED, NOT_RUNNING.format(reason=exc)
        except Exception:  # top of a compiler's task: an error fails its requests, not the engine
            log.exception("grammar_failed")
            code, message = FailureCode.ENGINE_FAILED, NOT_COMPILED
        else:
            self._ready += [(submit, worker.open(grammar)) for submit in submits]
            return
        for submit in submits:
            self._refuse(submit.key, message, code)

    def _forget_accounts(self) -> None:
        while len(self._tenants) > MAX_ACCOUNTS:
            idle = next((name for name, one in self._tenants.items() if not (one.waiting or one.is_compiling)), None)
            if idle is None:
                return
            del self._tenants[idle]

    def _refuse(self, key: int, message: str, code: FailureCode = FailureCode.GRAMMAR_REFUSED) -> None:
        self._refused.append(CoreFailure(key, code, message))
