"""The step loop of one replica, in process: plan, launch (prepare, run, sample), collect, output.

Where steps overlap, as they do on a GPU, a step is planned and launched while the one before it runs.

Owns the model, what it has on the device, and the scheduler. It knows no sockets: `core` feeds it from the front,
`bench` and tests call it directly.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moiety_engine.cache.blocks import BlockPool
from moiety_engine.cache.host import HostTier
from moiety_engine.config import Batching, EngineConfig, Overlap, PolicyName
from moiety_engine.errors import OutOfMemory
from moiety_engine.messages import CoreFailure, CoreLoad, CoreOutput, CoreStep, CoreSubmit
from moiety_engine.model.loading import load_model
from moiety_engine.model.transformer import Transformer
from moiety_engine.runner.resident import Resident, free_cached_memory
from moiety_engine.runner.runner import Flight
from moiety_engine.runner.sizes import sizes_for
from moiety_engine.scheduling.kv import KvLedger
from moiety_engine.scheduling.scheduler import Limits, Scheduler
from moiety_engine.scheduling.strategies import STRATEGIES
from moiety_engine.steps.tracer import StepTracer
from moiety_wire.messages import FailureCode, FinishReason

MAX_NUM_LOGPROBS = 20


class EngineLoop:
    """One model on one device. Not thread-safe: one thread submits and steps."""

    def __init__(self, model: Transformer, config: EngineConfig, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.model = model
        self.config = config
        self._clock_ns = clock_ns
        self.sizes = sizes = sizes_for(model, config)
        self._resident: Resident | None = Resident(model, sizes)
        host = HostTier(sizes.num_host_blocks) if sizes.num_host_blocks else None
        pool = BlockPool(sizes.num_blocks)
        apart = model.arithmetic.invariant
        ledger = KvLedger(pool, sizes.block_size, prefix_caching=config.prefix_caching, host=host, answers_apart=apart)
        limits = Limits(sizes.max_batch_tokens, sizes.max_running, config.static_batch_size, config.batch_timeout_ms)
        policy = config.policy if config.batching is Batching.CONTINUOUS else PolicyName.FCFS
        self.scheduler = Scheduler(ledger, limits, STRATEGIES[config.batching], policy)
        on_cuda = model.device.type == "cuda"
        self.overlaps = on_cuda if config.overlap is Overlap.AUTO else config.overlap is Overlap.ON
        self._flight: Flight | None = None  # launched, and not collected
        self._outputs: list[CoreOutput] = []
        self._failures: list[CoreFailure] = []
        self._tracer = StepTracer(config.traced_steps_per_s)
        self._requests_total = 0
        self.steps_total = 0

    @property
    def block_size(self) -> int:
        return self.sizes.block_size

    @property
    def replays(self) -> bool:
        """Whether decode steps are replayed as captured graphs."""
        return self._resident is not None and self._resident.runner.graphs is not None

    @property
    def max_context_tokens(self) -> int:
        return self.sizes.max_context_tokens

    def submit(self, submit: CoreSubmit) -> None:
        """Queue a request; one that cannot be served comes back as a failure with the next step."""
        self._requests_total += 1
        num_prompt = len(submit.prompt_ids)
        longest = self.max_context_tokens - (0 if submit.embed else 1)
        if not 1 <= num_prompt <= longest:
            message = f"the prompt has {num_prompt} tokens; it must have 1 to {longest}"
            self._failures.append(CoreFailure(submit.key, FailureCode.CONTEXT_LENGTH_EXCEEDED, message))
            return
        seed = submit.sampling.seed
        self.scheduler.add(submit, seed=secrets.randbits(63) if seed is None else seed, now_ns=self._clock_ns())

    def extend(self, key: int, credit_tokens: int, *, last: bool) -> None:
        """Raise a request's credit (a total)."""
        self._emit(self.scheduler.extend(key, credit_tokens, last=last, now_ns=self._clock_ns()))

    def abort(self, key: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request before the next step; its blocks are free when this returns."""
        self._emit(self.scheduler.abort(key, reason, now_ns=self._clock_ns()))

    def step(self) -> bool:
        """Plan a step and launch it; then take in the result of the step before, where steps overlap, or else of this
        one. False: there was nothing to do."""
        resident = self._awake()
        plan = self.scheduler.plan(self._clock_ns())
        if resident.host_kv is not None:
            resident.host_kv.run(plan.swap_out, plan.swap_in)
        launched = resident.runner.launch(plan) if plan.chunks else None
        if not self.overlaps:
            self._collect(resident, launched)
            return launched is not None
        before, self._flight = self._flight, launched
        self._collect(resident, before)
        if launched is not None:
            self.scheduler.launched(plan)
        return launched is not None or before is not None

    def warm_up(self) -> None:
        """See that the first request does not pay for what is done once. Only before the first request."""
        self.scheduler.swap_costs(self._awake().warm_up())

    # ── asleep ──

    @property
    def asleep(self) -> bool:
        return self._resident is None

    def sleep(self, on_progress: Callable[[], None] = lambda: None) -> int:
        """Give the device's memory back: the weights go to host memory, what the KV cache holds is forgotten. Only
        while no request is open. Returns the bytes of the weights and of the cache. Raises OutOfMemory where the host
        has no room for the weights; the loop is awake then, and has lost nothing but time."""
        assert self.scheduler.idle, "a replica sleeps only when no request is open"
        resident = self._awake()
        self._collect(resident, self._flight)
        self._flight = None
        freed = self.model.leave(on_progress) + self.sizes.num_blocks * self.model.kv_bytes_per_block(self.block_size)
        self.scheduler.kv.forget()
        self._resident = None
        del resident
        free_cached_memory(self.model.device)
        return freed

    def wake(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Take the memory again, and be as after the start. Raises OutOfMemory; the loop sleeps on then."""
        assert self._resident is None, "a replica that is awake was woken"
        problem = ""
        try:
            if self.model.away:
                self.model.come_back(on_progress)
            self._resident = Resident(self.model, self.sizes)
            self.warm_up()
        except (OutOfMemory, torch.OutOfMemoryError) as exc:
            problem = str(exc)
        if problem:  # only now does nobody hold what had been made, as the error did
            self._resident = None
            if not self.model.away:
                self.model.leave(on_progress)
            free_cached_memory(self.model.device)
            raise OutOfMemory(problem)

    def take_outputs(self) -> CoreStep | None:
        """What happened since the last call, if anything."""
        admissions, refusals = self.scheduler.take_verdicts()
        failures = self._failures + refusals
        traced = self._tracer.take()
        if not self._outputs and not failures and not admissions and not traced:
            return None
        step = CoreStep(self._outputs, failures, self.load(), admissions, traced)
        self._outputs, self._failures = [], []
        return step

    def load(self) -> CoreLoad:
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        return CoreLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_paused=scheduler.num_paused,
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_used,
            kv_blocks_cached=pool.num_cached,
            block_size=self.block_size,
            steps_total=self.steps_total,
            prompt_tokens_total=scheduler.prompt_tokens_total,
            cached_tokens_total=scheduler.cached_tokens_total,
            output_tokens_total=scheduler.output_tokens_total,
            requests_total=self._requests_total,
            host_blocks_total=scheduler.kv.host.num_blocks if scheduler.kv.host else 0,
            host_blocks_used=scheduler.kv.host.num_used if scheduler.kv.host else 0,
            swapped_out_blocks_total=scheduler.kv.swapped_out_total,
            swapped_in_blocks_total=scheduler.kv.swapped_in_total,
            classes=scheduler.class_loads(),
            overshot_tokens_total=scheduler.overshot_tokens_total,
        )

    def _awake(self) -> Resident:
        assert self._resident is not None, "a replica that sleeps has nothing to run"
        return self._resident

    def _collect(self, resident: Resident, flight: Flight | None) -> None:
        if flight is not None:
            found = resident.runner.collect(flight)
            now_ns = self._clock_ns()
            self._tracer.ended(flight.plan, self.scheduler, self.steps_total, now_ns)
            self._outputs += [CoreOutput(key, [], scores=scores) for key, scores in found.scores]
            self._outputs += self.scheduler.commit(flight.plan, found.token_ids, found.logprobs, now_ns, found.vectors)
            self.steps_total += 1

    def _emit(self, output: CoreOutput | None) -> None:
        if output is not None:
            self._outputs.append(output)


def load_loop(
    config: EngineConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
    clock_ns: Callable[[], int] = time.time_ns,
) -> EngineLoop:
    """Load the checkpoint folder that the configuration names and make a loop of it. `progress(done, total)` in bytes.
    Raises EngineError with what to do."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    model = load_model(
        Path(config.model),
        device=device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        quantization=config.quantization,
        moe_kernel=config.moe_kernel,
        batch_invariant=config.batch_invariant,
        num_threads=config.num_threads,
        load_format=config.load_format,
        progress=progress,
    )
    return EngineLoop(model, config, clock_ns=clock_ns)
