"""A replica's device memory apart from the weights: KV cache, swap space, captured graphs.

It is allocated as a whole, and released as a whole when the replica sleeps.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import structlog
import torch

from moiety_engine.cache.host import Copies
from moiety_engine.errors import OutOfMemory
from moiety_engine.kv_transfer.connector import NO_CONNECTOR, KvConnector
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.transformer import Transformer
from moiety_engine.moe.tenants import TenantSlots
from moiety_engine.runner.control_messages import Allocate, ControlSender
from moiety_engine.runner.graphs import DecodeGraphs
from moiety_engine.runner.kv_swap import HostKv
from moiety_engine.runner.micro_batches import WHOLE, StepSplit
from moiety_engine.runner.runner import Runner
from moiety_engine.runner.sizes import Sizes
from moiety_engine.runner.state_rows import StateCopier
from moiety_engine.scheduling.plan import Chunk, Plan
from moiety_engine.scheduling.preemption.preemption_execution import SwapCost
from moiety_engine.scheduling.speculative_decoding.costs import SIZES
from moiety_engine.sequence import Sequence
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

log = structlog.get_logger()

_SMALL = 8  # rows of a step of a step
_TIMED_SMALL, _TIMED = 4, 7  # steps per size; the first few compile what the others replay
_TIMING_S = 1.0


class DeviceState:
    """KV cache, host tier and runner of one replica.

    Used by the step loop's thread only. Raises OutOfMemory, with what to do, where the device has too little memory.
    """

    def __init__(
        self,
        model: Transformer,
        sizes: Sizes,
        controls: ControlSender,
        tenants: TenantSlots | None = None,
        *,
        num_mask_words: int = 0,
        kv_connector: KvConnector = NO_CONNECTOR,
        adapters: Mapping[str, int] | None = None,
        cutting: StepSplit = WHOLE,
    ) -> None:
        """Allocate the state. `kv_connector` connects to other engines' KV; see Runner for the other options."""
        self._model, self._sizes, self._controls = model, sizes, controls
        self._kv_receiver = kv_connector.kv_receiver
        has_states = bool(model.spec.recurrent_layers)
        self.copies_blocks = self._kv_receiver is not None or sizes.num_host_blocks > 0 or has_states  # in some steps
        scratch = int(sizes.graphs)  # one block that no sequence gets
        with controls.run_on_all_ranks(_allocation(sizes, scratch)):
            self._allocate(sizes.num_blocks + scratch, sizes.num_state_slots, sizes.num_record_tokens)
        self.runner = Runner(
            model,
            self.kv,
            controls,
            tenants,
            num_mask_words=num_mask_words,
            kv_sender=kv_connector.kv_sender,
            adapters=adapters,
            cutting=cutting,
            image_cache_bytes=sizes.image_cache_bytes,
        )

    def _allocate(self, num_blocks: int, num_state_slots: int, num_record_tokens: int) -> None:
        model, sizes = self._model, self._sizes
        try:
            kv = model.allocate_kv(num_blocks, sizes.block_size, num_state_slots, num_record_tokens)
            self.kv = replace(kv, windows=sizes.windows)
        except RuntimeError as exc:  # torch raises this on a CPU
            kv_gib = sizes.num_blocks * model.kv_bytes_per_block(sizes.block_size) / 2**30
            kv_gib += num_state_slots * (model.state_bytes + num_record_tokens * model.record_bytes) / 2**30
            raise OutOfMemory(
                f"a KV cache of {kv_gib:.2f} GiB does not fit on {model.device}: lower --kv-memory-bytes, "
                "or leave it out to use the measured free memory"
            ) from exc
        try:
            self.host_kv = HostKv(self.kv, sizes.num_host_blocks) if sizes.num_host_blocks else None
            self._state_copier = StateCopier(self.kv, sizes.num_host_state_slots, model.recurrent)
        except RuntimeError as exc:
            raise OutOfMemory(
                f"the host has too little memory for {sizes.num_host_blocks} blocks of the host tier: "
                "lower --host-kv-memory-bytes"
            ) from exc

    def copy_blocks(self, plan: Plan) -> None:
        """Run the plan's copies and replays, and write received KV into the cache.

        Call it before the plan runs.
        """
        if plan.swap_out or plan.swap_in:
            self.move(Copies(plan.swap_out, plan.swap_in))
        if plan.state_replays or plan.state_copies:
            self.move_states(plan.state_replays, plan.state_copies)
        for kv_load in plan.kv_loads:
            assert self._kv_receiver is not None, "KV is loaded without a receiver"
            self._kv_receiver.load(*kv_load)

    def move(self, copies: Copies) -> None:
        """Copy blocks between the cache and the host tier now."""
        if self.host_kv is not None:
            self._controls.swap(copies.outs, copies.ins)
            self.host_kv.run_own(0, copies.outs, copies.ins)

    def move_states(self, replays: list[tuple[int, int]], copies: list[tuple[int, int]]) -> None:
        """Advance recurrent states by recorded tokens, and then copy states between slots."""
        if replays or copies:
            self._controls.move_states(replays, copies)
            self._state_copier.replay(0, replays)
            self._state_copier.run(0, copies)

    def warm_up(self) -> SwapCost:
        """Run a prefill and a decode without a request, and capture the decode graphs. Returns the cost of swapping.

        The first request then does not pay for compilation and lazy initialisation. Leaves no state behind. Call it
        only before the first request.
        """
        cost = SwapCost()
        if self.host_kv is not None:
            bytes_per_s = self.host_kv.measure_bandwidth()
            cost = SwapCost(self.host_kv.block_bytes / bytes_per_s, self._model.state_bytes / bytes_per_s)
        blank = CoreSubmit(0, "", STANDARD, [0] * 4, Sampling(), 1, 0, [], 1, b"", 0)
        sequences = [Sequence(blank, order=0, seed=0) for _ in range(self._model.ranks.num_cache_groups)]
        for group, sequence in enumerate(sequences):
            sequence.kv.group = group
            sequence.kv.state_slot = 0
            sequence.kv.fill_tables(list(range(-(-5 // self._sizes.block_size))), self.kv.num_groups)
        for num_tokens, decodes in ((4, False), (1, True)):
            chunks = [Chunk(sequence, num_tokens, samples=True) for sequence in sequences]
            plan = Plan(chunks, len(chunks) if decodes else 0, num_tokens * len(chunks), [])
            self.runner.collect(self.runner.launch(plan))
            for sequence in sequences:
                sequence.kv.num_computed += num_tokens
                sequence.tokens.append(0)
        if self._sizes.graphs:
            self._capture()
        return cost

    def time_decodes(self, clock_ns: Callable[[], int]) -> list[float]:
        """Measure the seconds of a decode step with drafts, for as many step sizes as time allows, at least one.

        Compiles the programs that replay these steps. Leaves no state behind. Call it only before the first request.
        """
        blank = CoreSubmit(0, "", STANDARD, [0], Sampling(), 1, 0, [], 1, b"", 0)
        sequence, found = Sequence(blank, order=0, seed=0), []
        sequence.kv.state_slot = 0
        tokens = random.Random(0)
        begin_ns = clock_ns()
        for size in SIZES:
            if size > min(self._sizes.max_batch_tokens, self._sizes.num_blocks * self._sizes.block_size):
                break
            sequence.kv.fill_tables(list(range(-(-size // self._sizes.block_size))), self.kv.num_groups)
            times_s = []
            for _ in range(_TIMED_SMALL if size <= _SMALL else _TIMED):
                draft = tuple(tokens.randrange(self._model.spec.vocab_size) for _ in range(size - 1))
                plan = Plan([Chunk(sequence, size, samples=True, draft=draft)], 1, size, [])
                began_ns = clock_ns()
                self.runner.collect(self.runner.launch(plan))
                times_s.append((clock_ns() - began_ns) / 1e9)
            found.append(min(times_s))
            if (clock_ns() - begin_ns) / 1e9 > _TIMING_S:
                break
        return found

    def _capture(self) -> None:
        sizes = self._sizes
        graphs = DecodeGraphs(
            self._model,
            self.kv,
            self.runner.staging,
            scratch_block=sizes.num_blocks,
            max_running=sizes.max_running,
            max_context=sizes.max_context_tokens,
        )
        try:
            graphs.capture()
        except RuntimeError as exc:
            log.warning(
                "decode_graphs_unavailable", reason=str(exc), advice="--no-cuda-graphs disables them explicitly"
            )
            return
        self.runner.graphs = graphs


def _allocation(sizes: Sizes, scratch: int) -> Allocate:
    num_blocks = sizes.num_blocks + scratch
    return Allocate(
        num_blocks,
        sizes.block_size,
        sizes.num_host_blocks,
        sizes.image_cache_bytes,
        sizes.num_state_slots,
        sizes.num_host_state_slots,
        sizes.num_record_tokens,
        sizes.windows,
    )


def free_cached_memory(device: torch.device) -> None:
    """Return the memory that torch caches but nothing uses to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
