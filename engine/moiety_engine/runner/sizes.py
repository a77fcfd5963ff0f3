"""Sizes of a replica's device state, derived from the configuration, the model and the memory."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_engine.cache.table_layout import TableLayout
from moiety_engine.cache_setup import entry_block_size, table_windows
from moiety_engine.config import EngineConfig, Offload, Speculate
from moiety_engine.errors import InvalidConfig
from moiety_engine.memory import available_bytes, device_memory
from moiety_engine.model.transformer import Transformer
from moiety_engine.runner.control_messages import ControlSender
from moiety_engine.runner.memory import (
    ADAPTER_BYTES,
    ADAPTER_FRACTION,
    CPU_FRACTION,
    kv_budget_bytes,
    num_host_blocks,
    num_host_slots,
    num_kv_blocks,
    num_states,
)
from moiety_engine.runner.profiling import StepBounds, measure
from moiety_wire.roles import EngineRole


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a replica's device state and of its steps."""

    block_size: int
    max_batch_tokens: int
    max_running: int
    max_context_tokens: int
    num_blocks: int
    num_host_blocks: int
    graphs: bool  # decode steps are captured and replayed
    adapter_bytes: int = 0  # device memory for adapters; 0 if none are served
    image_cache_bytes: int = 0  # device memory for encoded images; 0 without an encoder
    num_state_slots: int = 0  # of each recurrent layer; 0 without any
    num_host_state_slots: int = 0  # in host memory, for swapped-out sequences
    windows: tuple[int | None, ...] = (None,)  # of the block tables
    num_record_tokens: int = 0  # tokens of a draft whose inputs each state slot records; 0 without speculation


def sizes_for(
    model: Transformer,
    config: EngineConfig,
    controls: ControlSender,
    local_ranks: int = 1,
    *,
    draft_models: tuple[Transformer, ...] = (),
) -> Sizes:
    """Return the sizes; choose those that the configuration leaves open.

    A GPU's memory is measured with the largest step. A host's memory is shared with its other ranks. The budget of the
    KV cache covers the caches of a draft model or MTP layers too. Raises InvalidConfig and OutOfMemory.
    """
    on_cuda = model.device.type == "cuda"
    adapter_bytes = adapter_budget_bytes(model, config)
    image_cache_bytes = 0 if model.vision is None else config.images.cache_bytes
    encoder_bytes = 0 if model.vision is None else model.vision.workspace_bytes(config.images.max_pixels)
    block_size = config.block_size or entry_block_size(model.spec)
    # on a CPU small blocks cost almost nothing
    block_size = block_size or (16 if on_cuda else 4) * model.ranks.rank_position.layout.dcp
    groups = model.ranks.num_cache_groups
    max_batch_tokens = config.max_batch_tokens or max(groups * (8192 if on_cuda else 512), config.max_running or 0)
    max_running = config.max_running or min(groups * (256 if on_cuda else 64), max_batch_tokens)
    if max_batch_tokens < max_running:
        raise InvalidConfig(
            f"max_batch_tokens ({max_batch_tokens}) must be at least max_running ({max_running}), because "
            "every running request decodes one token a step; raise max_batch_tokens or lower max_running"
        )
    context = min(config.max_context_tokens or model.spec.max_context_tokens, model.spec.max_context_tokens)
    budget = config.kv_memory_bytes
    if budget is None and on_cuda:
        budget = kv_budget_bytes(
            *measure(model, controls, StepBounds(block_size, max_batch_tokens, max_running, context)),
            adapter_bytes,
            image_cache_bytes + encoder_bytes,
        )
    elif budget is None:
        budget = int(available_bytes() * CPU_FRACTION) // local_ranks
    state_bytes = model.state_bytes
    num_record_tokens = config.speculate_tokens if state_bytes and config.speculate is not Speculate.OFF else 0
    slot_bytes = state_bytes + num_record_tokens * model.record_bytes
    num_state_slots = 0 if not state_bytes else num_states(budget, slot_bytes, max_running)
    budget -= num_state_slots * slot_bytes
    block_bytes = model.kv_bytes_per_block(block_size)
    layout = TableLayout(block_size, table_windows(model, config), max_chunk_tokens=max_batch_tokens)
    drafts_bytes = sum(drafting.kv_bytes_per_block(block_size) for drafting in draft_models)
    num_blocks = num_kv_blocks(
        budget_bytes=budget,
        block_bytes=block_bytes + drafts_bytes,
        layout=layout,
        max_running=max_running,
        max_context=context,
    )
    num_host = num_host_blocks(
        device=model.device,
        wanted_bytes=config.host_kv_memory_bytes,
        kv_bytes=num_blocks * block_bytes,
        block_bytes=block_bytes,
        host_bytes=available_bytes() // local_ranks,
    )
    num_host_states = num_host_slots(num_host * block_bytes, state_bytes, max_running)
    num_host -= -(-num_host_states * state_bytes // max(1, block_bytes))
    longest = layout.longest_context(num_blocks)
    context = context if longest is None else min(context, longest)
    waits = model.ranks.everyone.size > 1 or model.offloads  # a graph cannot wait for other ranks or for experts
    graphs = on_cuda and config.cuda_graphs and not waits and not state_bytes  # states are no input of graphs
    return Sizes(
        block_size,
        max_batch_tokens,
        max_running,
        context,
        num_blocks,
        num_host,
        graphs,
        adapter_bytes,
        image_cache_bytes,
        num_state_slots,
        num_host_states,
        layout.windows,
        num_record_tokens,
    )


def adapter_budget_bytes(model: Transformer, config: EngineConfig) -> int:
    """Return the device memory for adapters on each rank.

    Raises InvalidConfig where adapters are configured but not supported.
    """
    has_adapters = config.adapter_memory_bytes or config.adapters
    if model.arithmetic.invariant and model.device.type == "cuda":
        reason = "with --batch-invariant on a GPU: leave out --batch-invariant"
    elif config.offload.what is not Offload.NONE:  # other ranks may have the experts
        reason = "with offloaded experts: leave out --offload"
    elif config.transfer.role is not EngineRole.BOTH:
        reason = f"on an engine of role {config.transfer.role}: leave out --role"
    elif config.adapter_memory_bytes is not None:
        return config.adapter_memory_bytes
    elif model.device.type == "cuda":
        return int(device_memory(model.device).total_bytes * ADAPTER_FRACTION)
    else:
        return ADAPTER_BYTES
    if has_adapters:
        raise InvalidConfig(f"adapters are not available {reason}, or leave out --adapter and --adapter-memory-bytes")
    return 0
