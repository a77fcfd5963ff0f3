"""Loop of virtual time: submit arrivals, plan a step, advance by the device model's time, commit the tokens.

There is no wall clock and no randomness: the same workload gives the same run. The scheduler never learns the length of
an answer. It sees one bound for all requests (`max_tokens`); the driver ends an answer by sampling the end-of-sequence
token at the trace's length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from moiety_engine.errors import EngineError
from moiety_engine.messages import CoreFinish, CoreSubmit
from moiety_engine.scheduling.plan import Plan
from moiety_engine.simulator.devices import SimulatedDevice
from moiety_engine.simulator.records import Record, Run, Samples, ServiceAccount, Tenant
from moiety_engine.simulator.replica import NO_BIAS, PredictionBias, make_scheduler, num_copied
from moiety_wire.classes import OverloadAction, ServiceClass
from moiety_wire.messages import Sampling
from moiety_workload.request import TraceRequest, Workload

START_NS = 1_000_000_000_000  # the scheduler takes 0 for "not reached"
_END_TOKEN, OUTPUT_TOKEN, _FIRST_PROMPT_TOKEN = 0, 1, 2
_POLL_NS = 1_000_000  # time until a scheduler that has requests but planned nothing is polled again
_STUCK_AFTER_NS = 120 * 10**9  # time without a planned step after which the run counts as stuck
_NUM_SAMPLES = 2400  # samples of the accounts over the window of arrivals
_SAMPLING = Sampling()


class SimulationStuck(EngineError):
    """The scheduler has requests but runs none."""


@dataclass(frozen=True, slots=True)
class DeviceTerms:
    """Device type, policy and classes with which devices of a simulation serve."""

    device: SimulatedDevice
    policy: str
    classes: Mapping[str, ServiceClass]


class Driver:
    """One simulated run. `drain`: continue after the last arrival until all requests have ended."""

    def __init__(
        self,
        workload: Workload,
        device: SimulatedDevice,
        policy_name: str,
        classes: Mapping[str, ServiceClass],
        *,
        biases: PredictionBias = NO_BIAS,
        max_tokens: int | None = None,
        drain: bool = True,
        on_progress: Callable[[float, int], None] | None = None,
    ) -> None:
        self._workload = workload
        if workload.prefix_block_tokens is not None:
            device = msgspec.structs.replace(device, block_size=workload.prefix_block_tokens)  # the trace's blocks
        self._device = device
        self._classes = classes
        self._fallbacks = {name: _fallback(service, classes) for name, service in classes.items()}
        self._max_tokens = max_tokens or max(request.output_tokens for request in workload.requests)
        self._drain = drain
        self._on_progress = on_progress
        self._scheduler = make_scheduler(
            device, policy_name, prefix_caching=workload.prefix_block_tokens is not None, biases=biases
        )
        self._max_context = device.num_blocks * device.block_size
        self._records: list[Record] = []
        self._tenants: dict[str, Tenant] = {}
        self._accounts: dict[tuple[str, str], ServiceAccount] = {}
        self._account_list: list[ServiceAccount] = []
        self._prompts: dict[int, list[int]] = {}
        self._num_open = 0
        self._num_steps = 0
        self._busy_ns = 0
        self._computed_tokens = 0
        self._copied_blocks = 0
        self._kv_used_ns = 0.0
        self._window_ns = round(workload.duration_s * 1e9)
        self._sample_ns = max(1, self._window_ns // _NUM_SAMPLES)
        self._samples = Samples(self._sample_ns / 1e9)

    def run(self) -> Run:
        """Run to the end of the drain, or of the arrivals. Raises Stuck, EngineError."""
        waiting = deque(self._workload.requests)
        now_ns, next_sample_ns, idle_since_ns = START_NS, START_NS, START_NS
        window_end_ns = START_NS + self._window_ns
        while waiting or self._num_open or now_ns < window_end_ns:
            while waiting and START_NS + waiting[0].arrival_s * 1e9 <= now_ns:
                self._submit(waiting.popleft(), now_ns)
            plan = self._scheduler.plan(now_ns)
            self._take_failures(now_ns)
            if plan.chunks:
                end_ns = now_ns + max(1, round(self._cost_s(plan, now_ns) * 1e9))
            else:
                end_ns = self._idle_until(now_ns, waiting, idle_since_ns)
            for at_ns in range(next_sample_ns, min(end_ns, window_end_ns + 1), self._sample_ns):
                self._samples.take(self._account_list)
                next_sample_ns = at_ns + self._sample_ns
            if now_ns < window_end_ns <= end_ns:
                self._close_window()
                if not self._drain:
                    return self._result(window_end_ns)
            if plan.chunks:
                self._step(plan, now_ns, end_ns)
                idle_since_ns = end_ns
            now_ns = end_ns
        return self._result(now_ns)

    # ── requests come and go ──

    def _submit(self, request: TraceRequest, now_ns: int) -> None:
        service = self._classes[request.service_class]
        arrival_ns = START_NS + round(request.arrival_s * 1e9)
        weight = self._workload.weights.get(request.tenant, 1.0)
        tenant = self._tenants.setdefault(request.tenant, Tenant(request.tenant, weight))
        account = self._accounts.get((request.tenant, request.service_class))
        if account is None:
            account = self._accounts[request.tenant, request.service_class] = ServiceAccount(
                tenant, request.service_class
            )
            self._account_list.append(account)
        record = Record(len(self._records), request, service, account, arrival_ns)
        self._records.append(record)
        tenant.record_arrival(arrival_ns)
        account.record_arrival()
        self._num_open += 1
        max_tokens = min(self._max_tokens, self._max_context - request.input_tokens)
        if max_tokens < 1:
            self._fail(record, "context_length_exceeded", None, now_ns)
            return
        submit = CoreSubmit(
            key=record.key,
            tenant_id=request.tenant,
            service=service,
            prompt_ids=self._prompt(request),
            sampling=_SAMPLING,
            max_tokens=max_tokens,
            min_tokens=0,
            stop_token_ids=[_END_TOKEN],
            credit_tokens=max_tokens,
            cache_salt=request.tenant.encode(),
            arrival_unix_ns=arrival_ns,
            tenant_weight=weight,
            fallback=self._fallbacks[request.service_class],
        )
        self._give(record, submit, now_ns)

    def _give(self, record: Record, submit: CoreSubmit, now_ns: int) -> None:
        """Submit a request to the scheduler."""
        self._scheduler.add(submit, seed=record.key, now_ns=now_ns)

    def _prompt(self, request: TraceRequest) -> list[int]:
        """Return a prompt whose tokens match where the trace's blocks match.

        Without prefixes in the trace, the prompt shares nothing that a prefix cache could reuse.
        """
        size = self._workload.prefix_block_tokens
        if size is None:
            return self._prompts.setdefault(request.input_tokens, [_FIRST_PROMPT_TOKEN] * request.input_tokens)
        if not request.prefix_ids:
            return [-len(self._records)] * request.input_tokens  # equal to no other prompt
        tokens: list[int] = []
        for block in request.prefix_ids:
            tokens += [block + _FIRST_PROMPT_TOKEN] * size
        return tokens[: request.input_tokens]

    def _fail(self, record: Record, reason: Any, retry_after_s: float | None, now_ns: int) -> None:
        record.failure = reason
        record.retry_after_s = retry_after_s
        self._close(record, now_ns)

    def _close(self, record: Record, now_ns: int) -> None:
        record.end_ns = now_ns
        account = record.account
        account.tenant.num_open -= 1
        if record.scheduled_ns == 0:
            account.left_queue()
        self._num_open -= 1

    def _take_failures(self, now_ns: int) -> None:
        for failure in self._scheduler.take_verdicts()[1]:
            self._fail(self._records[failure.key], failure.reason or failure.code, failure.retry_after_s, now_ns)

    def _finish(self, record: Record, finish: CoreFinish, now_ns: int) -> None:
        record.cached_tokens = finish.num_cached_tokens
        record.served_class = finish.served_class
        self._close(record, now_ns)
        if self._on_progress is not None:
            self._on_progress(min(1.0, (now_ns - START_NS) / self._window_ns), self._num_open)

    # ── a step ──

    def _cost_s(self, plan: Plan, now_ns: int) -> float:
        """Return the device's seconds for the plan; record started requests and recomputed tokens."""
        records = self._records
        decode_context = plan.num_decode + sum(
            chunk.sequence.kv.num_computed for chunk in plan.chunks[: plan.num_decode]
        )
        attended_pairs = 0
        for chunk in plan.chunks[plan.num_decode :]:
            done, num_tokens = chunk.sequence.kv.num_computed, chunk.num_tokens
            attended_pairs += num_tokens * done + num_tokens * (num_tokens + 1) // 2
            record = records[chunk.sequence.request.submit.key]
            if record.scheduled_ns == 0:
                record.scheduled_ns = now_ns
                record.cached_tokens = record.peak_computed = done
                record.account.left_queue()
            self._note_prefill(record, done, num_tokens)
        for sequence in plan.preempted:
            record = records[sequence.request.submit.key]
            record.num_preemptions += 1
            record.forbidden_preemptions += not record.service_class.preemptible
        self._computed_tokens += plan.num_rows
        copied = num_copied(plan)
        self._copied_blocks += copied
        seconds = self._device.step_s(plan.num_rows, len(plan.chunks), decode_context, attended_pairs, copied)
        if now_ns < START_NS + self._window_ns:
            self._kv_used_ns += self._scheduler.kv.pool.num_used / self._device.num_blocks * seconds * 1e9
        return seconds

    def _note_prefill(self, record: Record, done: int, num_tokens: int) -> None:
        """Record the prompt tokens that a chunk computes, and those that are recomputed.

        A sequence with output had all but its newest token computed, whatever it lost since.
        """
        peak = record.peak_computed
        if record.num_output:
            peak = max(peak, record.request.input_tokens + record.num_output - 1)
        end = done + num_tokens
        again = max(0, min(peak, end) - done)
        record.prefill_tokens += num_tokens
        record.recomputed_tokens += again
        record.peak_computed = max(peak, end)
        if not record.num_output:
            record.computed_prompt_tokens += num_tokens - again
            record.account.service += num_tokens - again

    def _step(self, plan: Plan, now_ns: int, end_ns: int) -> None:
        """Record and commit the tokens of a step that ends at `end_ns`."""
        records, step = self._records, self._num_steps
        tokens: list[int] = []
        for chunk in plan.chunks:
            record = records[chunk.sequence.request.submit.key]
            account = record.account
            tenant = account.tenant
            if tenant.served_step != step:
                tenant.served_step = step
                tenant.waited_until(now_ns)
                tenant.quiet_since_ns = end_ns
            if not chunk.samples:
                continue
            account.service += 2
            num_output = record.num_output
            if num_output == 0:
                record.first_ns = end_ns
            late_ns = end_ns - num_output * record.tpot_ns
            record.latest_ns = max(record.latest_ns, late_ns)
            record.num_output = num_output = num_output + 1
            record.last_ns = end_ns
            tokens.append(OUTPUT_TOKEN if num_output < record.num_wanted else _END_TOKEN)
        self._num_steps += 1
        self._busy_ns += end_ns - now_ns
        for output in self._scheduler.commit(plan, tokens, [None] * len(tokens), end_ns):
            if output.finish is not None:
                self._finish(records[output.key], output.finish, end_ns)
        self._take_failures(end_ns)

    # ── time ──

    def _idle_until(self, now_ns: int, waiting: Iterable[TraceRequest], idle_since_ns: int) -> int:
        """Return the time of the next step when there was nothing to run.

        This is the next arrival, or soon if the scheduler holds requests back.
        """
        following = next(iter(waiting), None)
        arrival_ns = None if following is None else START_NS + round(following.arrival_s * 1e9)
        if not self._num_open:
            return max(now_ns + 1, START_NS + self._window_ns if arrival_ns is None else arrival_ns)
        if now_ns - idle_since_ns > _STUCK_AFTER_NS:
            raise SimulationStuck(
                f"{self._num_open} requests are open and none has run for {_STUCK_AFTER_NS / 1e9:g} s"
            )
        soon_ns = now_ns + _POLL_NS
        return soon_ns if arrival_ns is None else max(now_ns + 1, min(soon_ns, arrival_ns))

    def _close_window(self) -> None:
        for record in self._records:
            if record.end_ns == 0:
                record.close_window()

    def _result(self, end_ns: int) -> Run:
        for tenant in self._tenants.values():
            if tenant.num_open:
                tenant.waited_until(end_ns)
        window_busy_ns = max(1, min(self._busy_ns, self._window_ns))
        return Run(
            records=self._records,
            tenants=list(self._tenants.values()),
            accounts=self._account_list,
            samples=self._samples,
            window_s=self._workload.duration_s,
            end_ns=end_ns,
            end_s=(end_ns - START_NS) / 1e9,
            num_steps=self._num_steps,
            busy_s=self._busy_ns / 1e9,
            computed_tokens=self._computed_tokens,
            copied_blocks=self._copied_blocks,
            kv_used_fraction=self._kv_used_ns / window_busy_ns,
        )


def _fallback(service: ServiceClass, classes: Mapping[str, ServiceClass]) -> ServiceClass | None:
    """Return the next class below, for a class that downgrades on overload."""
    if service.on_overload is not OverloadAction.DOWNGRADE:
        return None
    below = [other for other in classes.values() if other.rank > service.rank]
    return min(below, key=lambda other: other.rank, default=None)
