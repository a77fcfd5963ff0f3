"""Step loop of one replica, in process: plan, launch (prepare, run, sample), collect, output.

Where steps overlap, as on a GPU, the next step is planned and launched while the previous one runs. In a pipeline of
ranks, steps are launched until each stage has one.

The loop joins five parts: the executor of the model, the scheduler, the intake of requests, the monitor of experts and
the reporter of what happened. `loop_setup` builds them. The loop uses no sockets: `core` passes it the requests of the
engine server; `bench` and tests call it directly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Self

import msgspec
import structlog
import torch

from moiety_engine.errors import EngineError, OutOfMemory, SleepFileError
from moiety_engine.load_reporter import TenantBlocks, load_of
from moiety_engine.messages import CoreLoad, CoreOutput, CoreStep, CoreSubmit, PrefixChanges
from moiety_engine.scheduling.outputs.finish import failure_after
from moiety_wire.block_hashes import tenant_mark
from moiety_wire.messages import FailureCode, FinishReason
from moiety_wire.prefix_events import pack_names

if TYPE_CHECKING:
    from moiety_engine.cache.prefix_change_log import PrefixChangeLog
    from moiety_engine.expert_monitor import ExpertMonitor
    from moiety_engine.first_steps import FirstSteps
    from moiety_engine.model_executor import ModelExecutor
    from moiety_engine.request_intake import RequestIntake
    from moiety_engine.runner.device_state import DeviceState
    from moiety_engine.runner.runner import InFlightStep, PipelinedStep
    from moiety_engine.scheduling.plan import Plan
    from moiety_engine.scheduling.scheduler import Scheduler
    from moiety_engine.step_reporter import StepReporter
    from moiety_wire.experts import ExpertBalance, ExpertLoad, ExpertLoadQuery
    from moiety_wire.fleet_service import ReplicaService

MAX_NUM_LOGPROBS = 20
_SETTLING_S = 0.5  # longest wait at startup for the weights' layout, which is prepared in the background

log = structlog.get_logger()


class EngineLoop:
    """One model on one device. Not thread-safe: one thread submits requests and runs steps."""

    def __init__(
        self,
        executor: ModelExecutor,
        scheduler: Scheduler,
        intake: RequestIntake,
        experts: ExpertMonitor,
        reporter: StepReporter,
        *,
        clock_ns: Callable[[], int],
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.intake = intake
        self.experts = experts
        self.first_steps: FirstSteps | None = None  # where to write the requests whose first token is being computed
        self.steps_total = 0
        self._reporter = reporter
        self._clock_ns = clock_ns
        self._flights: deque[InFlightStep | PipelinedStep] = deque()  # launched, and not collected
        self._is_pipelined = executor.steps_in_flight > 1
        self._is_alone = executor.controls.rank_group is None  # no rank can be lost
        self._forgotten: set[str] = set()  # deleted tenants
        self._tenant_blocks = TenantBlocks()
        self.prefix_changes: PrefixChangeLog | None = None

    @property
    def block_size(self) -> int:
        return self.executor.sizes.block_size

    @property
    def max_context_tokens(self) -> int:
        return self.intake.max_context_tokens

    def submit(self, submit: CoreSubmit) -> None:
        """Queue a request. A request that cannot be served is reported as a failure with the next step."""
        self.intake.submit_request(submit)

    def extend(self, key: int, credit_tokens: int, *, last: bool) -> None:
        """Raise a request's credit to `credit_tokens`, a total."""
        self.intake.extend_credit(key, credit_tokens, last=last)

    def abort(self, key: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request before the next step; its blocks are free when this returns."""
        self.intake.abort_request(key, reason)

    @property
    def follows_grammars(self) -> bool:
        return self.intake.grammars.is_open

    @property
    def waits_for_others(self) -> bool:
        """True if a request or a disk transfer is waiting on background work.

        Requests wait for grammar compilation, for loading an adapter or for a KV transfer; KV blocks are written to or
        read from the disk. Each of these waits ends by itself.
        """
        return self.intake.waits_for_others

    def step(self) -> bool:
        """Plan and launch a step, then collect a result: the previous step's if steps overlap, else this step's.

        In a pipeline that is full, the oldest step's result is collected first. Return False if there was nothing to
        do.
        """
        device_state = self.executor.awake()
        if self._is_alone:
            return self._step(device_state)
        with self.executor.controls.explaining():
            return self._step(device_state)

    def _step(self, device_state: DeviceState) -> bool:
        is_pipelined = self._is_pipelined
        if is_pipelined and len(self._flights) == self.executor.steps_in_flight:
            self._collect(device_state)
        plan = self._plan(device_state)
        launched = device_state.runner.launch(plan) if plan.chunks else None
        if launched is not None and launched.invalid_rows:
            self._end_mispredicted(launched)
        if self.experts.is_active:
            now_s = self._clock_ns() / 1e9
            self.experts.update(now_s, device_state.runner.staging, worked=launched is not None)
        num_before, overlaps = len(self._flights), self.executor.overlaps
        if launched is not None:
            self._flights.append(launched)
        if is_pipelined:
            if launched is not None:
                self.scheduler.launched(plan)
            else:
                self._collect(device_state)
            return launched is not None or num_before > 0
        if num_before or not overlaps:
            self._collect(device_state)
        if launched is not None and overlaps:
            self.scheduler.launched(plan)
        return launched is not None or num_before > 0

    def _plan(self, device_state: DeviceState) -> Plan:
        """Queue the requests whose waits are over, plan a step, and run the copies that it needs."""
        disk, draft, waits = self.intake.disk, self.executor.draft, self.intake.pending_requests.waits
        if disk is not None:
            disk.run_copies(device_state)
        if waits:
            self.intake.queue_ready()
        plan = self.scheduler.plan(self._clock_ns(), may_prefill_ahead=not waits)
        if device_state.copies_blocks:
            device_state.copy_blocks(plan)
        if draft is not None:
            plan = draft.fill(plan, device_state.runner.sampled_L)
        if self.first_steps is not None and plan.chunks:
            self._note_first_steps(plan)
        return plan

    def expert_load(self, ask: ExpertLoadQuery) -> ExpertLoad:
        """Return the load of the experts, a few seconds old at most."""
        return self.experts.load(ask, self._clock_ns() / 1e9)

    def scale_expert_ranks(self, num_ranks: int) -> None:
        """Begin to change the number of expert ranks; the load reports the progress, and the reason of a refusal."""
        self.experts.scaling.begin(num_ranks)

    def take_expert_balance(self) -> ExpertBalance | None:
        """Return the balance of expert load, a few times a minute; None if there is nothing new."""
        return self.experts.take_balance(self._clock_ns() / 1e9) if self.experts.is_active else None

    def record_prefix_changes(self) -> None:
        """Record the changes of the prefix cache from now on, for `take_prefix_changes`, while nothing is cached.

        No effect for models with recurrent states, whose blocks alone are no hit.
        """
        self.prefix_changes = self.scheduler.groups.record_prefix_changes()

    def take_prefix_changes(self) -> PrefixChanges | None:
        """Return the changes of the prefix cache's blocks, a few times a second; None if there is nothing new."""
        found = None if self.prefix_changes is None else self.prefix_changes.take(self._clock_ns())
        return None if found is None else PrefixChanges(pack_names(found[0]), pack_names(found[1]))

    def forget_tenants(self, tenant_ids: Iterable[str]) -> None:
        """Delete the cached KV of these tenants on every tier, and cache none of it from now on.

        Tenants that were passed before cost nothing.
        """
        fresh = set(tenant_ids) - self._forgotten
        if not fresh:
            return
        self._forgotten |= fresh
        marks = frozenset(map(tenant_mark, fresh))
        num_blocks = self.scheduler.groups.forget_tenants(marks)
        if not self.executor.asleep:
            self.executor.awake().runner.forget_images(marks)
        disk = self.intake.disk
        num_files = 0 if disk is None else disk.forget_tenants(fresh)
        log.info("tenant_blocks_deleted", num_tenants=len(fresh), num_blocks=num_blocks, num_files=num_files)

    def receive_fleet_service(self, replicas: Iterable[ReplicaService]) -> None:
        """Count the service of tenants on other replicas; no effect if this replica does not exchange it."""
        if self.scheduler.service_exchange is not None:
            self.scheduler.service_exchange.receive(replicas, self._clock_ns() / 1e9)

    def warm_up(self) -> None:
        """Do the one-time work that the first request would otherwise pay for. Call before the first request only."""
        executor = self.executor
        self.scheduler.swap_costs(executor.awake().warm_up())
        executor.settle_weights(_SETTLING_S)
        if self.scheduler.speculator is not None:
            self.scheduler.speculator.costs.measured(executor.awake().time_decodes(self._clock_ns))
        if executor.draft is not None:
            executor.draft.warm_up()

    # ── sleep mode ──

    @property
    def asleep(self) -> bool:
        return self.executor.asleep

    def sleep(self, on_progress: Callable[[], None] = lambda: None) -> int:
        """Release the device's memory: move the weights to host memory or a file, and discard the KV cache.

        Call only while no request is open. Return the bytes of the weights and of the cache. Raises OutOfMemory if
        there is too little room for the weights; the loop is then awake and has lost only time.
        """
        assert self.scheduler.idle, "a replica sleeps only when no request is open"
        device_state = self.executor.awake()
        self._drain(device_state)
        self.experts.prepare_sleep()
        if self.experts.is_active:
            self.experts.finish(self._clock_ns() / 1e9, device_state.runner.staging)
        freed = self.executor.offload_weights(on_progress)
        if self.intake.disk is not None:
            self.intake.disk.detach(device_state)
        del device_state
        self.scheduler.groups.forget()
        self.scheduler.speculative_prefill.forget()
        self.intake.adapters.give_up()
        self.executor.release_device_state()
        return freed

    def run_maintenance(self) -> bool:
        """Run the disk tier's maintenance in place of a step while the replica sleeps. Return False: no step ran."""
        if self.intake.disk is not None:
            self.intake.disk.run_maintenance()
        return False

    def wake(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Allocate the memory again and restore the state after startup.

        Raises OutOfMemory, and SleepFileError if the weights cannot be read; the loop then stays asleep.
        """
        assert self.executor.asleep, "the replica is awake already"
        problem: EngineError | None = None
        try:
            self.executor.restore(on_progress)
            self.warm_up()
            self.executor.awake().runner.forget_images(frozenset(map(tenant_mark, self._forgotten)))
            if self.intake.disk is not None:
                self.intake.disk.serve(self.executor.awake().kv)
            if self.experts.rebalancing is not None:
                self.experts.rebalancing.restart_clock(self._clock_ns() / 1e9)
        except (OutOfMemory, torch.OutOfMemoryError) as exc:
            problem = OutOfMemory(str(exc))
        except SleepFileError as exc:
            problem = SleepFileError(str(exc))
        if problem is not None:  # released here, where the exception holds no reference to the allocations
            try:
                self.executor.undo_restore(on_progress)
            except OutOfMemory as exc:  # what some ranks have read stays in memory
                log.warning("core_memory_kept", reason=str(exc), advice="free space, then wake or restart the engine")
            raise problem

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, exc: BaseException | None, _traceback: object) -> None:
        if exc is None:
            self.close()
        else:
            self.executor.controls.abandon(f"the first rank cannot continue: {exc or type(exc).__name__}")

    def close(self) -> None:
        """Stop the other ranks, if any, and close the links to other engines. The loop cannot be used afterwards."""
        executor, disk = self.executor, self.intake.disk
        if executor.steps_in_flight > 1 and executor.device_state is not None:
            with executor.controls.explaining():
                self._drain(executor.device_state)  # later stages still send results
        if disk is not None:
            disk.close(executor.device_state)
        self.intake.close()
        self.experts.close()
        executor.model.close()
        executor.controls.close()

    def take_outputs(self) -> CoreStep | None:
        """Return what happened since the last call; None if nothing did."""
        admissions, refusals = self.scheduler.take_verdicts()
        if self.scheduler.speculative_prefill.ended:
            self._reporter.add_outputs(self.scheduler.speculative_prefill.take_ended())
        if refusals:
            self._reporter.add_failures(*refusals)
        return self._reporter.take(admissions, self.load, self._clock_ns)

    def load(self) -> CoreLoad:
        intake, executor, now_ns = self.intake, self.executor, self._clock_ns()
        load = load_of(
            self.scheduler,
            intake.kv_connector,
            intake.disk,
            executor.expert_cache_figures(),
            self.experts.rebalancing,
            self.steps_total,
            intake.requests_total,
            executor.controls.waited_s(),
            executor.controls.excluded_ranks,
            self._tenant_blocks.read(self.scheduler, now_ns),
            {
                **intake.grammars.metrics(),
                **executor.image_metrics(),
                **intake.image_metrics(),
                **(self.experts.meter.metrics() if self.experts.is_active else {}),
                **self.experts.scaling.metrics(),
            },
            now_ns,
        )
        active_experts = self.experts.active_profile(load.num_running)
        return msgspec.structs.replace(load, active_experts=active_experts) if active_experts else load

    def _note_first_steps(self, plan: Plan) -> None:
        """Record the requests whose first token this step computes, or a step that still runs."""
        plans = [plan, *(flight.plan for flight in self._flights)]
        assert self.first_steps is not None, "first steps are recorded only where enabled"
        self.first_steps.write(chunk.sequence.key for one in plans for chunk in one.chunks[one.num_decode :])

    def _end_mispredicted(self, flight: InFlightStep | PipelinedStep) -> None:
        """Abort requests whose grammars cannot be followed further; the step's samples for them are discarded."""
        for key, code, message in flight.invalid_rows:
            ended = self.scheduler.abort(key, FinishReason.ABORT, now_ns=self._clock_ns())
            if ended is not None and ended.finish is not None:
                self._reporter.add_failures(failure_after(ended.finish, key, code, message))

    def _drain(self, device_state: DeviceState) -> None:
        """Collect all launched steps."""
        while self._flights:
            self._collect(device_state)

    def _collect(self, device_state: DeviceState) -> None:
        """Collect the oldest launched step, if there is one."""
        if not self._flights:
            return
        flight = self._flights.popleft()
        found = device_state.runner.collect(flight)
        if found.experts is not None:
            self.experts.meter.charge(flight.plan, found.experts)
        now_ns, reporter = self._clock_ns(), self._reporter
        is_traced = reporter.tracer.is_due(now_ns)
        if is_traced:
            reporter.tracer.ended(flight.plan, self.scheduler, self.steps_total, now_ns, self.experts.pace)
        if found.scores:
            good_scores = [one for one in found.scores if one[0] not in found.bad_scores]
            reporter.add_outputs(CoreOutput(key, [], scores=scores) for key, scores in good_scores)
            self._end_non_finite(now_ns, found.bad_scores)
        of_step = (found.token_ids, found.logprobs, now_ns, found.vectors, found.non_finite)
        came = self.scheduler.commit(flight.plan, *of_step)
        if is_traced:
            reporter.tracer.committed(came)
        reporter.add_outputs(came)
        if self.scheduler.output_processor.non_finite_keys:
            self._end_non_finite(now_ns)
        self.steps_total += 1

    def _end_non_finite(self, now_ns: int, also: Iterable[int] = ()) -> None:
        """End requests whose logits, vectors or scores are not finite, each with a failure."""
        for ended in self.scheduler.end_non_finite(now_ns, also):
            if self.intake.disk is not None:
                self.intake.disk.invalidate(ended.hashes)
            num_output_tokens = ended.finish.num_output_tokens
            log.error("output_not_finite", adapter=ended.adapter, num_output_tokens=num_output_tokens)
            self._reporter.add_failures(failure_after(ended.finish, ended.key, FailureCode.NON_FINITE, ended.message))
