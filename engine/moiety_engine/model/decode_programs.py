"""Recording and replay of decode steps on a CPU, without Python between the operations.

For a few rows the interpreter would take a large part of a step, for some dozens a few percent. What the layers compute
for a number of sequences is therefore recorded once, on persistent buffers, and then replayed, like a CUDA graph:
immediately for a few sequences, for more once that number has occurred often enough to pay for it. Layers that only our
kernels compute are replayed in one call; torch operations between the kernels are called one by one (`pass_recording`).

The embedding lookup and the logits are recorded with the layers if our kernels compute them: a step is then a few array
copies and one call. With 32 sequences this takes a fifth less time than torch operations around the layers' program,
since each of these reads its code and its tables again, which the weights have displaced from the CPU caches.

Recurrent states stay in their slots, whose numbers are inputs of a program. A step with a draft is not replayed, since
the tokens of a draft are one run.

S sequences, T tokens of the step (as many), D model width, V vocabulary, B blocks per row.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from moiety_engine.model.adapter_stacks import AdaptedRows
from moiety_engine.model.batch import GroupTable, RecurrentRows
from moiety_engine.model.pass_recording import PassProgram, record_pass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moiety_engine.model.batch import Batch, KvCache
    from moiety_engine.model.pass_recording import PassRecording

MAX_SEQUENCES = 64
FEW_SEQUENCES = 8  # up to this number a step is recorded when it first occurs
STEPS_TO_PAY = 4  # occurrences before a larger step is recorded, since each recording keeps its own buffers
MAX_RECORDED_BYTES = 1 << 30  # of all recordings' buffers; beyond it, no further larger step is recorded
MAX_LOGITS_BYTES = 16 << 20  # of one recording; larger logits are computed after the program
MIN_TABLE_WIDTH = 64  # blocks; a wider table needs a new recording, at twice the width

_Kind = tuple[int, bool]  # sequences, and whether any has an adapter


class _Table(Protocol):
    """Arrays of a step in one cache group; see runner.block_tables.HostTable."""

    @property
    def slots_T(self) -> np.ndarray: ...  # noqa: N802
    @property
    def block_table_SB(self) -> np.ndarray: ...  # noqa: N802


class _States(Protocol):
    """Runs of a step that recurrent layers see; see runner.state_rows.HostStates."""

    @property
    def slots_R(self) -> np.ndarray: ...  # noqa: N802
    @property
    def begins_R(self) -> np.ndarray: ...  # noqa: N802
    @property
    def num_single(self) -> int: ...
    @property
    def recorded_rows_K(self) -> np.ndarray: ...  # noqa: N802


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
    @property
    def states(self) -> _States | None: ...


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
        "has_state_S",
        "owner_T",
        "positions_T",
        "slots_T",
        "state_slot_S",
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
        states = own.states
        self.state_slot_S = None if states is None else states.slots_R.numpy()
        self.has_state_S = None if states is None else states.has_state_R.numpy()

    def take(self, step: Decodes) -> bool:
        """Copy a step into the arrays; return False, without a change, if it does not fit."""
        table_SB, owner_T, states = step.block_table_SB, self.owner_T, step.states
        width = table_SB.shape[1]
        if width > self.width or (owner_T is None and step.owner_T.any()):
            return False
        if states is not None:
            if states.num_single != len(self.token_ids_T) or len(states.recorded_rows_K):
                return False
            assert self.state_slot_S is not None, "the model has no recurrent layers"
            self.state_slot_S[:] = states.slots_R
            np.logical_not(states.begins_R, out=self.has_state_S)
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

    layers: PassProgram
    whole: PassProgram | None  # embedding, layers and, unless they are computed after it, logits
    x_TD: Tensor
    batch: Batch
    inputs: _Inputs
    replayed: Replayed
    tensors: list[Tensor]
    num_bytes: int  # of this memory


class DecodePrograms:
    """Owner of the recorded programs for one KV cache, by kind of step."""

    def __init__(self, parts: Pass) -> None:
        self._parts = parts
        self._cache: KvCache | None = None
        self._recorded: dict[_Kind, _Recorded] = {}
        self._times_seen: Counter[_Kind] = Counter()  # of kinds that are not recorded yet
        self._unrepeatable: set[_Kind] = set()  # kinds of steps with operations that cannot be recorded

    def takes(self, batch: Batch) -> bool:
        """Return whether `run` should process this step: decodes only, few enough, and recorded or worth recording."""
        sequences = batch.num_decode
        if sequences != batch.token_ids_T.shape[0] or sequences > MAX_SEQUENCES:
            return False
        states = batch.states
        if states is not None and (states.num_single != sequences or states.recorded_rows_K is not None):
            return False
        kind = _kind_of(batch)
        if kind in self._unrepeatable:
            return False
        if sequences <= FEW_SEQUENCES or kind in self._recorded:
            return True
        if sum(one.num_bytes for one in self._recorded.values()) >= MAX_RECORDED_BYTES:
            return False
        self._times_seen[kind] += 1
        return self._times_seen[kind] > STEPS_TO_PAY

    @property
    def only_kernels(self) -> bool:
        """Return whether recordings have shown that the layers run without torch operations."""
        return bool(self._recorded) and all(not one.layers.num_torch_calls for one in self._recorded.values())

    def forget(self) -> None:
        """Discard all recordings before weights or cache move, since they hold the old addresses."""
        self._cache, self._recorded = None, {}
        self._unrepeatable.clear()  # adapters of another rank may be recorded

    def decode(self, step: Decodes, kv: KvCache, *, with_logits: bool) -> Replayed | None:
        """Replay a step that contains only decodes, embedding included; `with_logits` requires its logits.

        Returns None if no matching step is recorded; `run` records it. Calls no torch function but recorded ones.
        """
        known = self._recorded.get((len(step.token_ids_T), step.adapter_T is not None))
        if known is None or known.whole is None or kv is not self._cache:
            return None
        if (with_logits and known.replayed.logits is None) or not known.inputs.take(step):
            return None
        known.whole.replay()
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
        known.layers.replay()
        return known.replayed.hidden_TD

    def _record(self, x_TD: Tensor, batch: Batch, kv: KvCache) -> Tensor:
        own = _own(batch, kv)
        _refill(own, batch)
        begun_TD, begun = record_pass(lambda: self._parts.begin(own.token_ids_T))
        own_x_TD = begun_TD if begun.is_repeatable and begun_TD.shape == x_TD.shape else torch.empty_like(x_TD)
        states = _read_states(own, kv)
        for _ in range(2):  # the first run may compute tables and compile code
            own_x_TD.copy_(x_TD)
            for part, slots_S, before in states:  # which the first run has advanced
                part.index_copy_(0, slots_S, before)
            output_TD, layers = record_pass(lambda: self._parts.layers(own_x_TD, own, kv))
            if layers.only_kernels:
                break
            if own.owner_T is not None:
                own.owner_T.zero_()  # its experts are counted now: the second run counts for NO_TENANT
        if not layers.is_repeatable:
            self._unrepeatable.add(_kind_of(batch))
            return output_TD
        whole, logits_SV, tensors = None, None, begun.tensors + layers.tensors
        if own_x_TD is begun_TD:
            logits_SV, last = self._logits(output_TD, tensors)
            whole = PassProgram(begun, layers, *last)
        replayed = Replayed(output_TD, logits_SV, None if logits_SV is None else logits_SV.numpy())
        num_bytes = sum(tensor.nbytes for tensor in tensors) + layers.result_bytes
        kept = own_x_TD, own, _Inputs(own), replayed, tensors, num_bytes
        self._recorded[_kind_of(batch)] = _Recorded(PassProgram(layers), whole, *kept)
        return output_TD

    def _logits(self, output_TD: Tensor, tensors: list[Tensor]) -> tuple[Tensor | None, list[PassRecording]]:
        """Record the logits, if our kernels compute them; adds their buffers to `tensors`."""
        logits_SV, recording = record_pass(lambda: self._parts.logits(output_TD))
        if not recording.only_kernels or logits_SV.nbytes > MAX_LOGITS_BYTES:
            return None, []
        tensors += recording.tensors
        return logits_SV, [recording]


def _read_states(own: Batch, kv: KvCache) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return each part of the recurrent states, with the slots of the batch's sequences and copies of these rows."""
    states = own.states
    if states is None:
        return []
    parts = [part for cache in kv.states for part in cache.parts]
    return [(part, states.slots_R, part.index_select(0, states.slots_R)) for part in parts]


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
        states=None if batch.states is None else _own_states(batch.states),
    )


def _own_states(states: RecurrentRows) -> RecurrentRows:
    return RecurrentRows(
        states.run_start_R1.clone(),
        states.slots_R.clone(),
        states.has_state_R.clone(),
        states.num_single,
        states.max_run,
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
    if own.states is not None and batch.states is not None:
        own.states.slots_R.copy_(batch.states.slots_R)
        own.states.has_state_R.copy_(batch.states.has_state_R)
