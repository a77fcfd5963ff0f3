"""A plan as the tensors that the model wants."""

from __future__ import annotations

import numpy as np
import torch

from moiety_engine.model.batch import Batch
from moiety_engine.scheduling.plan import Chunk, Plan


class BatchBuilder:
    """Builds Batch tensors on the device; pad rows take token 0 and the positions after their sequence's."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device

    def build(self, plan: Plan) -> Batch:
        """`wanted_rows` are those of the chunks that sample, then of those that embed, each in the plan's order."""
        chunks = plan.chunks
        lengths = [chunk.num_tokens + chunk.num_pad for chunk in chunks]
        starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        num_rows = int(starts[-1])
        token_ids = np.zeros(num_rows, dtype=np.int64)
        positions = np.empty(num_rows, dtype=np.int64)
        slots = np.empty(num_rows, dtype=np.int64)
        contexts = np.empty(len(chunks), dtype=np.int32)
        width = max(len(chunk.sequence.blocks) for chunk in chunks)
        tables = np.zeros((len(chunks), width), dtype=np.int32)
        for s, chunk in enumerate(chunks):
            sequence, begin, end = chunk.sequence, starts[s], starts[s + 1]
            first = sequence.num_computed
            tables[s, : len(sequence.blocks)] = sequence.blocks
            token_ids[begin : begin + chunk.num_tokens] = sequence.tokens[first : first + chunk.num_tokens]
            row_positions = np.arange(first, first + lengths[s])
            positions[begin:end] = row_positions
            in_block, offset = np.divmod(row_positions, self._block_size)
            slots[begin:end] = tables[s, in_block].astype(np.int64) * self._block_size + offset
            contexts[s] = first + lengths[s]
        wanted = [s for s, chunk in enumerate(chunks) if chunk.samples]
        wanted += [s for s, chunk in enumerate(chunks) if chunk.embeds]
        rows = [int(starts[s]) + chunks[s].num_tokens - 1 for s in wanted]
        return Batch(
            token_ids_T=self._to_device(token_ids),
            positions_T=self._to_device(positions),
            slots_T=self._to_device(slots),
            query_start_S1=self._to_device(starts),
            context_len_S=self._to_device(contexts),
            block_table_SB=self._to_device(tables),
            wanted_rows_L=self._to_device(np.asarray(rows, dtype=np.int64)),
            num_decode=plan.num_decode,
            max_context=int(contexts.max()),
            max_query=max(lengths),
        )

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def sampled(plan: Plan) -> list[Chunk]:
    """The chunks that get a token, in the order of `wanted_rows`."""
    return [chunk for chunk in plan.chunks if chunk.samples]
