"""Replaying decode steps on a CPU without Python between the operations.

At a handful of rows the interpreter would take a good part of a step, and at some dozens a few hundredths. So the jobs
that the layers run for a number of sequences are recorded once, on buffers that stay, and then replayed in one call,
like a GPU's graph: at once for a handful, for more once a number of sequences has come back often enough to pay for it.
A pass that does anything beside our kernels cannot be recorded and runs as before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moiety_engine.model.adapted import AdaptedRows
from moiety_kernels.cpu.team import Program, team

if TYPE_CHECKING:
    from collections.abc import Callable

    from moiety_engine.model.batch import Batch, KvCache

MAX_SEQUENCES = 64
FEW_SEQUENCES = 8  # up to which a step is recorded when it is first seen
STEPS_TO_PAY = 4  # that come before, where there are more: each recording keeps its own buffers
MIN_TABLE_WIDTH = 64  # blocks; a wider table is recorded anew, at twice the width

_Kind = tuple[int, bool]  # sequences, and whether any has an adapter

_ALLOCATIONS = {"empty", "empty_like"}
_QUERIES = {"data_ptr", "dim", "element_size", "is_contiguous", "numel", "stride", "__len__"}
_QUERIES |= {"__get__"}  # shape, dtype …
_VIEWS = {"as_strided", "view"}


class _Watch(TorchFunctionMode):
    """Keeps what is allocated, and notes whether torch itself computed anything."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self.only_kernels = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ in _ALLOCATIONS:
            self.tensors.append(result)
        elif func.__name__ not in _QUERIES | _VIEWS:
            self.only_kernels = False
        return result


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A program, the inputs that it reads, and all memory that it writes."""

    program: Program
    x_TD: Tensor
    batch: Batch
    output_TD: Tensor
    tensors: list[Tensor]


class DecodePrograms:
    """Owns the recorded programs, by kind of step, for one cache."""

    def __init__(self, layers: Callable[[Tensor, Batch, KvCache], Tensor]) -> None:
        self._layers = layers
        self._cache: KvCache | None = None
        self._recorded: dict[_Kind, _Recorded] = {}
        self._times_seen: Counter[_Kind] = Counter()  # of those that are not recorded yet
        self._recordable = True

    def takes(self, batch: Batch) -> bool:
        """Whether this is a step of few sequences with one token each, and recorded or worth it."""
        sequences = batch.num_decode
        if not self._recordable or sequences != batch.token_ids_T.shape[0] or sequences > MAX_SEQUENCES:
            return False
        kind = _kind_of(batch)
        if sequences <= FEW_SEQUENCES or kind in self._recorded:
            return True
        self._times_seen[kind] += 1
        return self._times_seen[kind] > STEPS_TO_PAY

    @property
    def only_kernels(self) -> bool:
        """Whether a recording has shown that the layers compute without torch."""
        return self._recordable and bool(self._recorded)

    def forget(self) -> None:
        """Weights or cache are about to move: what was recorded would read them where they were."""
        self._cache, self._recorded = None, {}

    def run(self, x_TD: Tensor, batch: Batch, kv: KvCache) -> Tensor:
        """What the layers make of x; valid until the next run."""
        if kv is not self._cache:
            self._cache, self._recorded = kv, {}
        known = self._recorded.get(_kind_of(batch))
        if known is None or not _has_room(known.batch, batch):
            return self._record(x_TD, batch, kv)
        known.x_TD.copy_(x_TD)
        _refill(known.batch, batch)
        team().replay(known.program)
        return known.output_TD

    def _record(self, x_TD: Tensor, batch: Batch, kv: KvCache) -> Tensor:
        sequences, width = batch.block_table_SB.shape
        wide = max(MIN_TABLE_WIDTH, 1 << (width - 1).bit_length())
        own = replace(
            batch,
            positions_T=batch.positions_T.clone(),
            slots_T=batch.slots_T.clone(),
            query_start_S1=batch.query_start_S1.clone(),
            context_len_S=batch.context_len_S.clone(),
            owner_T=None if batch.owner_T is None else batch.owner_T.clone(),
            block_table_SB=torch.zeros(sequences, wide, dtype=torch.int32),
            max_context=wide * kv.block_size,
            adapted=None if batch.adapted is None else AdaptedRows(batch.adapted.slot_T.clone()),
        )
        _refill(own, batch)
        for _ in range(2):  # the first time there may be tables to compute once, and code to compile
            own_x_TD = x_TD.clone()
            with team().recording() as jobs, _Watch() as watch:
                output_TD = self._layers(own_x_TD, own, kv)
            if watch.only_kernels:
                recorded = _Recorded(Program(jobs), own_x_TD, own, output_TD, watch.tensors)
                self._recorded[_kind_of(batch)] = recorded
                return output_TD
            if own.owner_T is not None:
                own.owner_T.zero_()  # its experts are counted: the second time they are nobody's
        self._recordable = False
        return output_TD


def _kind_of(batch: Batch) -> _Kind:
    return batch.num_decode, batch.adapted is not None


def _has_room(own: Batch, batch: Batch) -> bool:
    """Whether what was recorded on the one reads all of the other."""
    if batch.owner_T is not None and own.owner_T is None:
        return False
    return batch.block_table_SB.shape[1] <= own.block_table_SB.shape[1]


def _refill(own: Batch, batch: Batch) -> None:
    own.positions_T.copy_(batch.positions_T)
    own.slots_T.copy_(batch.slots_T)
    if own.owner_T is not None:
        own.owner_T.copy_(batch.owner_T) if batch.owner_T is not None else own.owner_T.zero_()  # nobody's
    if own.adapted is not None and batch.adapted is not None:
        own.adapted.slot_T.copy_(batch.adapted.slot_T)
    own.query_start_S1.copy_(batch.query_start_S1)
    own.context_len_S.copy_(batch.context_len_S)
    own.block_table_SB[:, : batch.block_table_SB.shape[1]].copy_(batch.block_table_SB)
