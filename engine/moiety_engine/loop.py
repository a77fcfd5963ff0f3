"""Step loop of one replica, in process: plan, launch (prepare, run, sample), collect, output.

Where steps overlap, as on a GPU, the next step is planned and launched while the previous one runs.

The loop owns the model, its state on the device, and the scheduler. It uses no sockets: `core` passes it the requests
of the engine server; `bench` and tests call it directly.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

import msgspec
import structlog
import torch

from moiety_engine.adapters.registry import AdapterRegistry
from moiety_engine.cache.prefix import tenant_mark
from moiety_engine.config import EngineConfig
from moiety_engine.disk.tier import DiskTier
from moiety_engine.distribution.rank_group import RankGroup
from moiety_engine.draft_model.draft_model import DraftModel
from moiety_engine.errors import OutOfMemory
from moiety_engine.first_steps import FirstSteps
from moiety_engine.kv_transfer.connector import exchange_of
from moiety_engine.load_reporter import LoadReporter, TenantBlocks, load_of
from moiety_engine.messages import CoreFailure, CoreFinish, CoreLoad, CoreOutput, CoreStep, CoreSubmit
from moiety_engine.model.transformer import Transformer
from moiety_engine.moe.load_watch import ExpertWatch
from moiety_engine.moe.tenants import TenantSlots
from moiety_engine.pending_requests import PendingRequests
from moiety_engine.runner.control_messages import ControlSender, Release
from moiety_engine.runner.device_state import DeviceState, free_cached_memory
from moiety_engine.runner.micro_batches import cutting_of
from moiety_engine.runner.overlap import steps_overlap
from moiety_engine.runner.rebalancing import rebalancing_of
from moiety_engine.runner.runner import InFlightStep
from moiety_engine.runner.sizes import sizes_for
from moiety_engine.runner.weights import Weights
from moiety_engine.scheduler_setup import build_scheduler
from moiety_engine.scheduling.plan import Plan
from moiety_engine.steps.tracer import StepTracer
from moiety_engine.structured_outputs.compile_queue import GrammarCompileQueue
from moiety_engine.structured_outputs.service import GrammarService
from moiety_engine.structured_outputs.stepping import GrammarHandle
from moiety_wire.experts import AskExperts, ExpertBalance, ExpertLoad
from moiety_wire.messages import FailureCode, FinishReason

MAX_NUM_LOGPROBS = 20
_SETTLING_S = 0.5  # longest wait at startup for the weights' layout, which is prepared in the background

log = structlog.get_logger()


class EngineLoop:
    """One model on one device. Not thread-safe: one thread submits requests and runs steps."""

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        rank_group: RankGroup | None = None,
        local_ranks: int = 1,
        grammars: GrammarService | str = "it was made without a tokenizer",
        draft_model: Transformer | None = None,
    ) -> None:
        """Build the loop and load the configured adapters.

        `rank_group` is the group of the model's other ranks; `local_ranks` ranks, including this one, run on this host.
        `grammars` is the service that compiles and steps grammars, or the reason why there is none. `draft_model` is
        given if the configuration names one. Raises AdapterError for a configured adapter that cannot be served.
        """
        self.model = model
        self.config = config
        self._clock_ns = clock_ns
        self.overlaps = steps_overlap(model, config)
        self._orders = ControlSender(rank_group, overlaps=self.overlaps)
        self.sizes = sizes = sizes_for(model, config, self._orders, local_ranks, draft_model=draft_model)
        self._draft = None if draft_model is None else DraftModel(draft_model, sizes, clock_ns)
        self._weights = Weights([model] if draft_model is None else [model, draft_model], self._orders)
        self._compile_queue = GrammarCompileQueue(grammars, config.grammar)
        self.exchange = exchange_of(config.transfer)
        self.adapters = AdapterRegistry(
            model,
            max_bytes=sizes.adapter_bytes,
            max_slots=config.max_adapters,
            max_rank=config.max_adapter_rank,
        )
        self._tenants = None if model.experts is None else TenantSlots()
        for name, folder in config.adapters.items():
            self.adapters.learn(name, Path(folder))
        self.adapters.load_all()
        self._device_state: DeviceState | None = self._allocate_device_state()
        self._experts = self._watch_experts()
        self.rebalancing = rebalancing_of(model, config, self._orders, clock_ns() / 1e9)
        self.scheduler = build_scheduler(config, model, sizes, self._draft)
        self.disk = DiskTier(config, model, self.scheduler, self._awake().kv) if config.disk_cache else None
        self._pending_requests = PendingRequests(self.exchange.arrivals, self.adapters, self._compile_queue, self.disk)
        self._flight: InFlightStep | None = None  # launched, and not collected
        self._outputs: list[CoreOutput] = []
        self._failures: list[CoreFailure] = []
        self._forgotten: set[str] = set()  # deleted tenants
        self._tracer = StepTracer(config.traced_steps_per_s)
        self._requests_total = 0
        self._tenant_blocks, self._load_reporter = TenantBlocks(), LoadReporter()
        self.first_steps: FirstSteps | None = None  # where to write the requests whose first token is being computed
        self.steps_total = 0

    @property
    def block_size(self) -> int:
        return self.sizes.block_size

    @property
    def replays(self) -> bool:
        """True if decode steps replay captured graphs."""
        return self._device_state is not None and self._device_state.runner.graphs is not None

    @property
    def max_context_tokens(self) -> int:
        return self.sizes.max_context_tokens

    def submit(self, submit: CoreSubmit) -> None:
        """Queue a request.

        A request that cannot be served is reported as a failure with the next step. `max_tokens` is cut at the context
        length: beyond it there may be no block for the request, and it would wait forever.
        """
        if submit.speculative_prefill is not None:
            self.scheduler.add(submit, seed=0, now_ns=self._clock_ns())
            return
        self._requests_total += 1
        num_prompt = len(submit.prompt_ids)
        longest = self.max_context_tokens - (0 if submit.embed else 1)
        if not 1 <= num_prompt <= longest:
            message = f"the prompt has {num_prompt} tokens; it must have 1 to {longest}"
            self._failures.append(CoreFailure(submit.key, FailureCode.CONTEXT_LENGTH_EXCEEDED, message))
            return
        room = self.max_context_tokens - num_prompt
        if not submit.embed and submit.max_tokens > room:
            submit = msgspec.structs.replace(submit, max_tokens=room, min_tokens=min(submit.min_tokens, room))
        if submit.hand_over is not None:
            submit = self.exchange.depart(submit)
        if self.disk is not None and submit.adapter:
            submit = msgspec.structs.replace(submit, cache_salt=self.disk.salted(submit))
        if not self._pending_requests.must_wait(submit):
            self._queue(submit, None)

    def extend(self, key: int, credit_tokens: int, *, last: bool) -> None:
        """Raise a request's credit to `credit_tokens`, a total."""
        if not self._pending_requests.extend(key, credit_tokens, last=last):
            self._emit(self.scheduler.extend(key, credit_tokens, last=last, now_ns=self._clock_ns()))

    def abort(self, key: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request before the next step; its blocks are free when this returns."""
        pending = self._pending_requests.leave(key)
        if pending is not None:
            num_resumed = len(pending.resumed_ids or ())
            ended = CoreFinish(reason, "", 0, num_resumed, 0, 0, self._clock_ns(), pending.service.name, [], 0)
            self._emit(CoreOutput(key, [], None, ended))
        else:
            self._emit(self.scheduler.abort(key, reason, now_ns=self._clock_ns()))

    @property
    def follows_grammars(self) -> bool:
        return self._compile_queue.is_open

    @property
    def waits_for_others(self) -> bool:
        """True if a request or a disk transfer is waiting on background work.

        Requests wait for grammar compilation, for loading an adapter or for a KV transfer; KV blocks are written to or
        read from the disk. Each of these waits ends by itself.
        """
        return not self._pending_requests.is_empty or (self.disk is not None and not self.disk.is_quiet)

    def step(self) -> bool:
        """Plan and launch a step, then collect a result: the previous step's if steps overlap, else this step's.

        Return False if there was nothing to do.
        """
        with self._orders.explaining():
            return self._step(self._awake())

    def _step(self, device_state: DeviceState) -> bool:
        if self.disk is not None:
            self.disk.turn(device_state.move)
        self._take_pending()
        plan = self.scheduler.plan(self._clock_ns(), may_prefill_ahead=self._pending_requests.is_empty)
        device_state.copy_blocks(plan)
        if self._draft is not None:
            plan = self._draft.fill(plan, device_state.runner.sampled_L)
        if self.first_steps is not None and plan.chunks:
            self._note_first_steps(plan)
        launched = device_state.runner.launch(plan) if plan.chunks else None
        if launched is not None:
            self._end_mispredicted(launched)
        if self._experts is not None:
            now_s = self._clock_ns() / 1e9
            self._experts.look(now_s, device_state.runner.staging)
            if self.rebalancing is not None:
                self.rebalancing.look(now_s, self._experts.take_picks(), worked=launched is not None)
        if not self.overlaps:
            self._collect(device_state, launched)
            return launched is not None
        before, self._flight = self._flight, launched
        self._collect(device_state, before)
        if launched is not None:
            self.scheduler.launched(plan)
        return launched is not None or before is not None

    def expert_load(self, ask: AskExperts) -> ExpertLoad:
        """Return the load of the experts, a few seconds old at most."""
        now_s = self._clock_ns() / 1e9
        if self._experts is None:
            return ExpertLoad(ask.ask_id, int(now_s), int(now_s))
        load = self._experts.load(ask, now_s)
        return load if self.rebalancing is None else self.rebalancing.with_places(load)

    def take_expert_balance(self) -> ExpertBalance | None:
        """Return the balance of expert load, a few times a minute; None if there is nothing new."""
        return None if self._experts is None else self._experts.take_balance(self._clock_ns() / 1e9)

    def forget_tenants(self, tenant_ids: Iterable[str]) -> None:
        """Delete the cached KV of these tenants on every tier, and cache none of it from now on.

        Tenants that were passed before cost nothing.
        """
        fresh = set(tenant_ids) - self._forgotten
        if not fresh:
            return
        self._forgotten |= fresh
        num_blocks = self.scheduler.groups.forget_tenants(frozenset(map(tenant_mark, fresh)))
        num_files = 0 if self.disk is None else self.disk.forget_tenants(fresh)
        log.info("tenants_forgotten", num_tenants=len(fresh), num_blocks=num_blocks, num_files=num_files)

    def warm_up(self) -> None:
        """Do the one-time work that the first request would otherwise pay for. Call before the first request only."""
        self.scheduler.swap_costs(self._awake().warm_up())
        self._weights.settle(_SETTLING_S)
        if self.scheduler.speculator is not None:
            self.scheduler.speculator.costs.measured(self._awake().time_decodes(self._clock_ns))
        if self._draft is not None:
            self._draft.warm_up()

    # ── sleep mode ──

    @property
    def asleep(self) -> bool:
        return self._device_state is None

    def sleep(self, on_progress: Callable[[], None] = lambda: None) -> int:
        """Release the device's memory: move the weights to host memory and discard the KV cache.

        Call only while no request is open. Return the bytes of the weights and of the cache. Raises OutOfMemory if the
        host has too little memory for the weights; the loop is then awake and has lost only time.
        """
        assert self.scheduler.idle, "a replica sleeps only when no request is open"
        device_state = self._awake()
        self._collect(device_state, self._flight)
        self._flight = None
        if self._experts is not None:
            self._experts.finish(self._clock_ns() / 1e9, device_state.runner.staging)
        kv_bytes = self.sizes.num_blocks * self._weights.kv_bytes_per_block(self.block_size)
        freed = self._weights.leave_or_stay(on_progress) + kv_bytes
        if self.disk is not None:
            self.disk.detach(device_state.move)
        self._orders.give(Release())
        self.scheduler.groups.forget()
        self.scheduler.speculative_prefill.forget()
        self.exchange.serve(None)
        self.adapters.give_up()
        self._release_device_state()
        del device_state
        free_cached_memory(self.model.device)
        return freed

    def tend(self) -> bool:
        """Run the disk tier's maintenance in place of a step while the replica sleeps. Return False: no step ran."""
        if self.disk is not None:
            self.disk.tend()
        return False

    def wake(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Allocate the memory again and restore the state after startup.

        Raises OutOfMemory; the loop then stays asleep.
        """
        assert self._device_state is None, "a replica that is awake was woken"
        problem = ""
        try:
            self._weights.reload_weights(on_progress)
            self._device_state = self._allocate_device_state()
            self.warm_up()
            if self.disk is not None:
                self.disk.serve(self._device_state.kv)
            if self.rebalancing is not None:
                self.rebalancing.look_again(self._clock_ns() / 1e9)
        except (OutOfMemory, torch.OutOfMemoryError) as exc:
            problem = str(exc)
        if problem:  # released here, where the exception holds no reference to the allocations
            self._release_device_state()
            self.exchange.serve(None)  # it references the cache too
            self._orders.give(Release())
            self._weights.leave(on_progress)
            free_cached_memory(self.model.device)
            raise OutOfMemory(problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, exc: BaseException | None, _traceback: object) -> None:
        if exc is None:
            self.close()
        else:
            self._orders.abandon(f"the first rank cannot go on: {exc or type(exc).__name__}")

    def close(self) -> None:
        """Stop the other ranks, if any, and close the links to other engines. The loop cannot be used afterwards."""
        if self.disk is not None:
            self.disk.close(None if self._device_state is None else self._device_state.move)
        self.exchange.close()
        self._compile_queue.close()
        self.adapters.close()
        self.model.close()
        self._orders.close()

    def take_outputs(self) -> CoreStep | None:
        """Return what happened since the last call; None if nothing did."""
        admissions, refusals = self.scheduler.take_verdicts()
        self._outputs += self.scheduler.speculative_prefill.take_ended()
        failures = self._failures + refusals
        traced = self._tracer.take()
        if not self._outputs and not failures and not admissions and not traced:
            return None
        ended = [output.key for output in self._outputs if output.finish] + [one.key for one in failures]
        for key in ended:
            self.adapters.ended(key)
        outputs = self.exchange.told(self._outputs, failures)
        tells = self._load_reporter.is_due(self._clock_ns(), is_news=bool(ended or admissions))
        self._outputs, self._failures = [], []
        return CoreStep(outputs, failures, self.load() if tells else None, admissions, traced)

    def load(self) -> CoreLoad:
        parts = self.disk, self.model.expert_cache, self.rebalancing, self.steps_total, self._requests_total
        held = self._tenant_blocks.read(self.scheduler, self._clock_ns())
        orders = self._orders.waited_s(), self._orders.masked_ranks
        return load_of(self.scheduler, self.exchange, *parts, *orders, held, self._compile_queue.figures())

    def _queue(self, submit: CoreSubmit, guide: GrammarHandle | None) -> None:
        seed = submit.sampling.seed
        seed = secrets.randbits(63) if seed is None else seed
        num_landing = self.exchange.num_landing(submit.key)
        self.scheduler.add(submit, seed=seed, now_ns=self._clock_ns(), guide=guide, num_landing=num_landing)

    def _take_pending(self) -> None:
        """Queue the pending requests whose wait is over; report those that cannot be served with this step."""
        if self._pending_requests.is_empty:
            return
        for submit, guide, is_last in self._pending_requests.take_ready():
            self._queue(submit, guide)
            if is_last:
                self.extend(submit.key, submit.credit_tokens, last=True)
        self._failures += self._pending_requests.take_refused()

    def _note_first_steps(self, plan: Plan) -> None:
        """Record the requests whose first token this step computes, or the previous step if it still runs."""
        plans = [plan] if self._flight is None else [plan, self._flight.plan]
        assert self.first_steps is not None, "asked only where they are wanted"
        self.first_steps.write(chunk.sequence.key for one in plans for chunk in one.chunks[one.num_decode :])

    def _end_mispredicted(self, flight: InFlightStep) -> None:
        """Abort requests whose grammars cannot be followed further; the step's samples for them are discarded."""
        for key, code, message in flight.astray:
            ended = self.scheduler.abort(key, FinishReason.ABORT, now_ns=self._clock_ns())
            if ended is not None and ended.finish is not None:
                self._failures.append(CoreFailure(key, code, message, ended.finish.num_output_tokens))

    def _allocate_device_state(self) -> DeviceState:
        num_mask_words, exchange = self._compile_queue.num_words, self.exchange
        slots = self.adapters.slots if self.adapters.is_open else None
        parts = (self.model, self.sizes, self._orders, self._tenants)
        cutting = cutting_of(self.config)
        device_state = DeviceState(
            *parts, num_mask_words=num_mask_words, exchange=exchange, adapters=slots, cutting=cutting
        )
        exchange.serve(device_state.kv)
        if self._draft is not None:
            self._draft.allocate(device_state.kv)
        return device_state

    def _release_device_state(self) -> None:
        self._device_state = None
        if self._draft is not None:
            self._draft.release()

    def _watch_experts(self) -> ExpertWatch | None:
        counter = self.model.expert_counter
        if self.model.experts is None or counter is None or self._tenants is None:
            return None
        return ExpertWatch(self.model.experts, counter, self._tenants, self._clock_ns() / 1e9)

    def _awake(self) -> DeviceState:
        assert self._device_state is not None, "a replica that sleeps has nothing to run"
        return self._device_state

    def _collect(self, device_state: DeviceState, flight: InFlightStep | None) -> None:
        if flight is not None:
            found = device_state.runner.collect(flight)
            now_ns = self._clock_ns()
            pace = None if self._experts is None else self._experts.pace
            self._tracer.ended(flight.plan, self.scheduler, self.steps_total, now_ns, pace)
            good_scores = [one for one in found.scores if one[0] not in found.bad_scores]
            self._outputs += [CoreOutput(key, [], scores=scores) for key, scores in good_scores]
            self._end_non_finite(now_ns, found.bad_scores)
            of_step = (found.token_ids, found.logprobs, now_ns, found.vectors, found.non_finite)
            came = self.scheduler.commit(flight.plan, *of_step)
            self._tracer.committed(came)
            self._outputs += came
            self._end_non_finite(now_ns)
            self.steps_total += 1

    def _end_non_finite(self, now_ns: int, also: Iterable[int] = ()) -> None:
        """End requests whose logits, vectors or scores are not finite, each with a failure."""
        for ended in self.scheduler.end_non_finite(now_ns, also):
            if self.disk is not None:
                self.disk.invalidate(ended.hashes)
            log.error("output_not_finite", adapter=ended.adapter, num_output_tokens=ended.num_output_tokens)
            self._failures.append(
                CoreFailure(ended.key, FailureCode.NON_FINITE, ended.message, ended.num_output_tokens)
            )

    def _emit(self, output: CoreOutput | None) -> None:
        if output is not None:
            self._outputs.append(output)
