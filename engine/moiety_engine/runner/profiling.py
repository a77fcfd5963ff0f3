"""Peak memory of a step on a GPU, measured by running the largest step."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from moiety_engine.memory import Memory, device_memory
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.hyper_connections import residual_shape
from moiety_engine.model.transformer import Transformer
from moiety_engine.runner.control_messages import Allocate, ControlSender, Release
from moiety_engine.runner.runner import Runner
from moiety_engine.scheduling.plan import Chunk, Plan
from moiety_engine.sequence import Sequence
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

_GREEDIEST = Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.1, num_logprobs=20)


class StepBounds(NamedTuple):
    """Bounds of a step. `max_context`: most tokens of a sequence."""

    block_size: int
    max_batch_tokens: int
    max_running: int
    max_context: int


def measure(model: Transformer, controls: ControlSender, bounds: StepBounds) -> tuple[Memory, int]:
    """Return the free memory beside the weights, and the bytes that steps take at their peak. CUDA only.

    One step is measured; the rows of further steps in flight in a pipeline are added.
    """
    free = device_memory(model.device)
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    kv_bytes = largest_step(model, controls, bounds)
    torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device)
    return free, max(0, peak - before - kv_bytes) + sent_rows_bytes(model, bounds, controls.steps_in_flight)


def sent_rows_bytes(model: Transformer, bounds: StepBounds, steps_in_flight: int) -> int:
    """Return the bytes of the rows that a stage keeps until the next stage has received them; 0 without stages."""
    if model.ranks.pipeline.size == 1:
        return 0
    num_rows = -(-bounds.max_batch_tokens // model.ranks.across.size)
    return steps_in_flight * math.prod(residual_shape(num_rows, model.spec)) * model.activation_dtype.itemsize


def largest_step(model: Transformer, controls: ControlSender, bounds: StepBounds) -> int:
    """Run the largest prefill step and the largest decode step, and return the bytes of their KV cache.

    The prefill has as many prompt tokens as a step may have, divided among the rank groups. All rows use the most
    expensive sampling. The KV cache is allocated for these steps and released afterwards.
    """
    block_size, max_batch_tokens, max_running, max_context = bounds
    num_groups = model.ranks.num_cache_groups
    lengths = _prompt_lengths(max_batch_tokens, max_running, min(max_context - 1, -(-max_batch_tokens // num_groups)))
    sequences = []
    blocks_of = [0] * num_groups
    for index, length in enumerate(lengths):
        sequence = Sequence(CoreSubmit(0, "", STANDARD, [0] * length, _GREEDIEST, 2, 0, [], 2, b"", 0), order=0, seed=0)
        sequence.kv.group = group = index % num_groups
        count = -(-(length + 1) // block_size)
        blocks = list(range(blocks_of[group], blocks_of[group] + count))
        sequence.kv.fill_tables(blocks, len(model.cache_groups))
        sequence.kv.state_slot = index
        blocks_of[group] += count
        sequences.append(sequence)
    num_blocks = max(blocks_of)
    num_states = len(sequences) if model.state_bytes else 0
    with controls.run_on_all_ranks(Allocate(num_blocks, block_size, 0, num_state_slots=num_states)):
        kv = model.allocate_kv(num_blocks, block_size, num_states)
    runner = Runner(model, kv, controls)
    runner.collect(runner.launch(Plan([Chunk(s, len(s.tokens), samples=True) for s in sequences], 0, sum(lengths), [])))
    many = [sequences[i % len(sequences)] for i in range(max_running)]  # the values that they compute do not matter
    for sequence in sequences:
        sequence.kv.num_computed = len(sequence.tokens)
        sequence.tokens.append(0)
    runner.collect(runner.launch(Plan([Chunk(s, 1, samples=True) for s in many], max_running, max_running, [])))
    controls.send(Release())
    model.ranks.pipeline.finish_sends()
    return num_blocks * model.kv_bytes_per_block(block_size) + num_states * model.state_bytes


def _prompt_lengths(max_batch_tokens: int, max_running: int, longest: int) -> list[int]:
    """Return the lengths of the fewest prompts that fill a step within the context limit."""
    lengths: list[int] = []
    left = max_batch_tokens
    while left > 0 and len(lengths) < max_running:
        lengths.append(min(left, longest))
        left -= lengths[-1]
    return lengths
