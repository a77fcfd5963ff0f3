"""Recording and replay of decode steps on a CPU, without Python between the operations.

For a few rows the interpreter would take a large part of a step, for some dozens a few percent. The jobs that the
layers run for a number of sequences are therefore recorded once, on persistent buffers, and then replayed in one call,
like a CUDA graph: immediately for a few sequences, for more once that number has occurred often enough to pay for it.
A pass that computes anything outside our kernels cannot be recorded and runs without replay.

For a few sequences the embedding lookup and the logits are recorded with the layers if our kernels compute them: a step
is then a few array copies and one call. With 32 sequences this was a tenth slower than running those two with torch
around the layers' program.

S sequences, T tokens of the step (as many), D model width, V vocabulary, B blocks per row.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moiety_engine.model.adapter_stacks import AdaptedRows
from moiety_engine.model.batch import GroupTable
from moiety_kernels.cpu.team import Program, team

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from moiety_engine.model.batch import Batch, KvCache
    from moiety_kernels.cpu.team import Job

MAX_SEQUENCES = 64
FEW_SEQUENCES = 8  # up to this number a step is recorded when it first occurs
STEPS_TO_PAY = 4  # occurrences before a larger step is recorded, since each recording keeps its own buffers
MIN_TABLE_WIDTH = 64  # blocks; a wider table needs a new recording, at twice the width

_Kind = tuple[int, bool]  # sequences, and whether any has an adapter

_ALLOCATIONS = {"empty", "empty_like"}
_QUERIES = {"data_ptr", "dim", "element_size", "is_contiguous", "numel", "stride", "__len__"}
_QUERIES |= {"__get__"}  # shape, dtype …
_VIEWS = {"as_strided", "unsqueeze", "view"}


class _Watch(TorchFunctionMode):
    """Function mode that keeps allocated tensors and detects whether torch itself computed anything."""

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


class _Table(Protocol):
    """Arrays of a step in one cache group; see runner.block_tables.HostTable."""

    @property
    def slots_T(self) -> np.ndarray: ...  # noqa: N802
    @property
    def block_table_SB(self) -> np.ndarray: ...  # noqa: N802


class Decodes(Protocol):
    """Arrays of a step in host memory that its decodes depend on; see runner.inputs.HostBatch."""

    @property
    def token_ids_T(self) -> np.ndarray: ...  # noqa: N802
    @property
    def positions_T(self) -> np.ndarray: ...  # noqa: N802
    @property
    def slots_T(self) -> np.ndarray: ...  # noqa: N802
    @property
    def owner_T(self) -> np.ndarray: ...  # noqa: N802
    @property
    def context_len_S(self) -> np.ndarray: ...  # noqa: N802
    @property
    def block_table_SB(self) -> np.ndarray: ...  # noqa: N802
    @property
    def adapter_T(self) -> np.ndarray | None: ...  # noqa: N802
    @property
    def further_tables(self) -> Sequence[_Table]: ...


class Pass(Protocol):
    """Parts of the model that are recorded."""

    def begin(self, token_ids_T: Tensor) -> Tensor:
        """Return x_TD, the embedding of the tokens."""
        ...

    def layers(self, x_TD: Tensor, batch: Batch, kv: KvCache) -> Tensor:
        """Return the output of the layers for x, which may be overwritten."""
        ...

    def logits(self, hidden_SD: Tensor) -> Tensor: ...


class _Inputs:
    """Arrays over the memory that a program reads a step's decodes from."""

    __slots__ = (
        "adapter_T",
        "context_len_S",
        "further_tables",
        "owner_T",
        "positions_T",
        "slots_T",
        "table_SB",
        "token_ids_T",
        "width",
    )

    def __init__(self, own: Batch) -> None:
        self.token_ids_T, self.positions_T = own.token_ids_T.numpy(), own.positions_T.numpy()
        self.slots_T, self.context_len_S = own.slots_T.numpy(), own.context_len_S.numpy()
        self.owner_T = None if own.owner_T is None else own.owner_T.numpy()
        self.adapter_T = None if own.adapted is None else own.adapted.slot_T.numpy()
        self.table_SB = own.block_table_SB.numpy()
        self.width = self.table_SB.shape[1]
        self.further_tables = [(table.slots_T.numpy(), table.block_table_SB.numpy()) for table in own.further_tables]

    def take(self, step: Decodes) -> bool:
        """Copy a step into the arrays; return False, without a change, if it does not fit."""
        table_SB, owner_T = step.block_table_SB, self.owner_T
        width = table_SB.shape[1]
        if width > self.width or (owner_T is None and step.owner_T.any()):
            return False
        self.token_ids_T[:] = step.token_ids_T
        self.positions_T[:] = step.positions_T
        self.slots_T[:] = step.slots_T
        self.context_len_S[:] = step.context_len_S
        self.table_SB[:, :width] = table_SB
        for (slots_T, further_SB), table in zip(self.further_tables, step.further_tables, strict=True):
            slots_T[:] = table.slots_T
            further_SB[:, :width] = table.block_table_SB
        if owner_T is not None:
            owner_T[:] = step.owner_T
        if self.adapter_T is not None:
            self.adapter_T[:] = step.adapter_T
        return True


@dataclass(frozen=True, slots=True)
class Replayed:
    """Results of a replayed step, valid until the next one. Both logits are None if they are not recorded."""

    hidden_TD: Tensor
    logits_SV: Tensor | None
    logits: np.ndarray | None  # the same memory


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Recorded programs, the inputs that they read, and all memory that they write."""

    layers: Program
    whole: Program | None  # for a few sequences: embedding, layers and logits
    x_TD: Tensor
    batch: Batch
    inputs: _Inputs
    replayed: Replayed
    tensors: list[Tensor]


class DecodePrograms:
    """Owner of the recorded programs for one KV cache, by kind of step."""

    def __init__(self, parts: Pass) -> None:
        self._parts = parts
        self._cache: KvCache | None = None
        self._recorded: dict[_Kind, _Recorded] = {}
        self._times_seen: Counter[_Kind] = Counter()  # of kinds that are not recorded yet
        self._recordable = True

    def takes(self, batch: Batch) -> bool:
        """Return whether `run` should process this step: decodes only, few enough, and recorded or worth recording."""
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
        """Return whether a recording has shown that the layers run without torch operations."""
        return self._recordable and bool(self._recorded)

    def forget(self) -> None:
        """Discard all recordings before weights or cache move, since they hold the old addresses."""
        self._cache, self._recorded = None, {}

    def decode(self, step: Decodes, kv: KvCache, *, with_logits: bool) -> Replayed | None:
        """Replay a step that contains only decodes, embedding included; `with_logits` requires its logits.

        Returns None if no matching step is recorded; `run` records it. Calls no torch function.
        """
        known = self._recorded.get((len(step.token_ids_T), step.adapter_T is not None))
        if known is None or known.whole is None or kv is not self._cache:
            return None
        if (with_logits and known.replayed.logits is None) or not known.inputs.take(step):
            return None
        team().replay(known.whole)
        return known.replayed

    def run(self, x_TD: Tensor, batch: Batch, kv: KvCache) -> Tensor:
        """Return the output of the layers for x, valid until the next run."""
        if kv is not self._cache:
            self._cache, self._recorded = kv, {}
        known = self._recorded.get(_kind_of(batch))
        if known is None or not _fits(known.batch, batch):
            return self._record(x_TD, batch, kv)
        known.x_TD.copy_(x_TD)
        _refill(known.batch, batch)
        team().replay(known.layers)
        return known.replayed.hidden_TD

    def _record(self, x_TD: Tensor, batch: Batch, kv: KvCache) -> Tensor:
        own = _own(batch, kv)
        _refill(own, batch)
        begin_jobs, begun_TD, begun = _watched(lambda: self._parts.begin(own.token_ids_T))
        own_x_TD = begun_TD if begun.only_kernels and begun_TD.shape == x_TD.shape else torch.empty_like(x_TD)
        for _ in range(2):  # the first run may compute tables and compile code
            own_x_TD.copy_(x_TD)
            jobs, output_TD, watch = _watched(lambda: self._parts.layers(own_x_TD, own, kv))
            if watch.only_kernels:
                tensors = begun.tensors + watch.tensors
                whole, logits_SV = None, None
                if own_x_TD is begun_TD and batch.num_decode <= FEW_SEQUENCES:
                    logits_jobs, logits_SV = self._logits(output_TD, tensors)
                    whole = Program([*begin_jobs, *jobs, *logits_jobs])
                replayed = Replayed(output_TD, logits_SV, None if logits_SV is None else logits_SV.numpy())
                kept = own_x_TD, own, _Inputs(own), replayed, tensors
                self._recorded[_kind_of(batch)] = _Recorded(Program(jobs), whole, *kept)
                return output_TD
            if own.owner_T is not None:
                own.owner_T.zero_()  # its experts are counted now: the second run counts for NO_TENANT
        self._recordable = False
        return output_TD

    def _logits(self, output_TD: Tensor, tensors: list[Tensor]) -> tuple[list[Job], Tensor | None]:
        """Record the jobs that compute the logits, if our kernels do; adds their buffers to `tensors`."""
        jobs, logits_SV, watch = _watched(lambda: self._parts.logits(output_TD))
        if not watch.only_kernels:
            return [], None
        tensors += watch.tensors
        return jobs, logits_SV


def _watched(compute: Callable[[], Tensor]) -> tuple[list[Job], Tensor, _Watch]:
    with team().recording() as jobs, _Watch() as watch:
        result = compute()
    return jobs, result, watch


def _own(batch: Batch, kv: KvCache) -> Batch:
    """Return a batch of the same kind in persistent memory, sized for longer contexts."""
    sequences, width = batch.block_table_SB.shape
    wide = max(MIN_TABLE_WIDTH, 1 << (width - 1).bit_length())
    return replace(
        batch,
        token_ids_T=batch.token_ids_T.clone(),
        positions_T=batch.positions_T.clone(),
        slots_T=batch.slots_T.clone(),
        query_start_S1=batch.query_start_S1.clone(),
        context_len_S=batch.context_len_S.clone(),
        owner_T=None if batch.owner_T is None else batch.owner_T.clone(),
        block_table_SB=torch.zeros(sequences, wide, dtype=torch.int32),
        max_context=wide * kv.block_size,
        adapted=None if batch.adapted is None else AdaptedRows(batch.adapted.slot_T.clone()),
        further_tables=tuple(
            GroupTable(table.slots_T.clone(), torch.zeros(sequences, wide, dtype=torch.int32))
            for table in batch.further_tables
        ),
    )


def _kind_of(batch: Batch) -> _Kind:
    return batch.num_decode, batch.adapted is not None


def _fits(own: Batch, batch: Batch) -> bool:
    """Return whether a recording made with `own` can read all of `batch`."""
    if batch.owner_T is not None and own.owner_T is None:
        return False
    return batch.block_table_SB.shape[1] <= own.block_table_SB.shape[1]


def _refill(own: Batch, batch: Batch) -> None:
    own.token_ids_T.copy_(batch.token_ids_T)
    own.positions_T.copy_(batch.positions_T)
    own.slots_T.copy_(batch.slots_T)
    if own.owner_T is not None:
        own.owner_T.copy_(batch.owner_T) if batch.owner_T is not None else own.owner_T.zero_()  # NO_TENANT
    if own.adapted is not None and batch.adapted is not None:
        own.adapted.slot_T.copy_(batch.adapted.slot_T)
    own.query_start_S1.copy_(batch.query_start_S1)
    own.context_len_S.copy_(batch.context_len_S)
    own.block_table_SB[:, : batch.block_table_SB.shape[1]].copy_(batch.block_table_SB)
    for ours, table in zip(own.further_tables, batch.further_tables, strict=True):
        ours.slots_T.copy_(table.slots_T)
        ours.block_table_SB[:, : table.block_table_SB.shape[1]].copy_(table.block_table_SB)
