"""The step loop of one replica, in process: plan, prepare, run, sample, output.

Owns the model, the KV tensors, the scheduler and the sampler. It knows no sockets: `core` feeds it from the front,
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
from moiety_engine.config import Batching, EngineConfig, PolicyName
from moiety_engine.errors import InvalidConfig
from moiety_engine.messages import CoreFailure, CoreLoad, CoreOutput, CoreStep, CoreSubmit
from moiety_engine.model.loading import load_model
from moiety_engine.model.transformer import Transformer
from moiety_engine.runner.embeddings import embeddings
from moiety_engine.runner.inputs import BatchBuilder, sampled
from moiety_engine.runner.memory import available_bytes, kv_budget_bytes, num_host_blocks, num_kv_blocks
from moiety_engine.runner.swap import HostKv
from moiety_engine.sampling import Sampler
from moiety_engine.scheduling.kv import KvLedger
from moiety_engine.scheduling.plan import Chunk, Plan
from moiety_engine.scheduling.room import SwapCost
from moiety_engine.scheduling.scheduler import Limits, Scheduler
from moiety_engine.scheduling.strategies import STRATEGIES
from moiety_engine.sequence import Sequence
from moiety_wire.classes import STANDARD
from moiety_wire.messages import FailureCode, FinishReason, Sampling

MAX_NUM_LOGPROBS = 20


class EngineLoop:
    """One model on one device. Not thread-safe: one thread submits and steps."""

    def __init__(self, model: Transformer, config: EngineConfig, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.model = model
        self.config = config
        self._clock_ns = clock_ns
        on_cuda = model.device.type == "cuda"
        self.block_size = config.block_size or (16 if on_cuda else 4)  # on a CPU small blocks cost next to nothing
        max_batch_tokens = config.max_batch_tokens or max(8192 if on_cuda else 512, config.max_running or 0)
        max_running = config.max_running or min(256 if on_cuda else 64, max_batch_tokens)
        if max_batch_tokens < max_running:
            raise InvalidConfig(
                f"max_batch_tokens ({max_batch_tokens}) must be at least max_running ({max_running}): every running "
                "request decodes one token a step; raise the one or lower the other"
            )
        context = min(config.max_context_tokens or model.spec.max_context_tokens, model.spec.max_context_tokens)
        num_blocks = num_kv_blocks(
            budget_bytes=kv_budget_bytes(model.device, config.kv_memory_bytes),
            block_bytes=model.kv_bytes_per_block(self.block_size),
            block_size=self.block_size,
            max_running=max_running,
            max_context=context,
        )
        self.max_context_tokens = min(context, num_blocks * self.block_size)
        self.kv = model.allocate_kv(num_blocks, self.block_size)
        block_bytes = model.kv_bytes_per_block(self.block_size)
        num_host = num_host_blocks(
            device=model.device,
            wanted_bytes=config.host_kv_memory_bytes,
            kv_bytes=num_blocks * block_bytes,
            block_bytes=block_bytes,
            host_bytes=available_bytes(),
        )
        self._host_kv = HostKv(self.kv, num_host) if num_host else None
        host = HostTier(num_host) if num_host else None
        ledger = KvLedger(BlockPool(num_blocks), self.block_size, prefix_caching=config.prefix_caching, host=host)
        limits = Limits(max_batch_tokens, max_running, config.static_batch_size, config.batch_timeout_ms)
        policy = config.policy if config.batching is Batching.CONTINUOUS else PolicyName.FCFS
        self.scheduler = Scheduler(ledger, limits, STRATEGIES[config.batching], policy)
        self._builder = BatchBuilder(self.block_size, model.device)
        self._sampler = Sampler(model.spec.vocab_size, model.device)
        self._outputs: list[CoreOutput] = []
        self._failures: list[CoreFailure] = []
        self._requests_total = 0
        self.steps_total = 0

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

    @torch.inference_mode()
    def step(self) -> bool:
        """One step of the model. False: there was nothing to run."""
        plan = self.scheduler.plan(self._clock_ns())
        if self._host_kv is not None:
            self._host_kv.run(plan.swap_out, plan.swap_in)
        if not plan.chunks:
            return False
        hidden_LD = self.model.hidden(self._builder.build(plan), self.kv)
        rows = [chunk.sequence for chunk in sampled(plan)]
        token_ids, logprobs = self._sampler.sample(self.model.logits(hidden_LD[: len(rows)]), rows)
        vectors = embeddings(hidden_LD[len(rows) :]) if len(hidden_LD) > len(rows) else []
        self._outputs += self.scheduler.commit(plan, token_ids, logprobs, self._clock_ns(), vectors)
        self.steps_total += 1
        return True

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a prefill and a decode that no request asked for, so that the first request does not pay for compiling
        and lazy initialisation. Leaves nothing behind; only before the first request."""
        if self._host_kv is not None:
            seconds_per_block = self._host_kv.block_bytes / self._host_kv.measure_bandwidth()
            self.scheduler.swap_costs(SwapCost(seconds_per_block))
        blank = CoreSubmit(0, "", STANDARD, [0] * 4, Sampling(), 1, 0, [], 1, b"", 0)
        sequence = Sequence(blank, order=0, seed=0)
        sequence.blocks = list(range(self.scheduler.kv.blocks_for(5)))
        for num_tokens, num_decode in ((4, 0), (1, 1)):
            plan = Plan([Chunk(sequence, num_tokens, samples=True)], num_decode, num_tokens, [])
            logits_LV = self.model.forward(self._builder.build(plan), self.kv)
            self._sampler.sample(logits_LV, [sequence])
            sequence.num_computed += num_tokens
            sequence.tokens.append(0)

    def take_outputs(self) -> CoreStep | None:
        """What happened since the last call, if anything."""
        admissions, refusals = self.scheduler.take_verdicts()
        failures = self._failures + refusals
        if not self._outputs and not failures and not admissions:
            return None
        step = CoreStep(self._outputs, failures, self.load(), admissions)
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
        )

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
        moe_kernel=config.moe_kernel,
        num_threads=config.num_threads,
        progress=progress,
    )
    return EngineLoop(model, config, clock_ns=clock_ns)
