"""Rows of a step as recurrent layers see them, in host memory, copies of states between slots, and replays of tokens.

R runs, each of consecutive tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moiety_engine.model.batch import CompressedCache, KvCache, RecurrentRows, RecurrentStateCache
from moiety_engine.model.layers import RecurrentLayer
from moiety_engine.sequence import Sequence
from moiety_engine.staging import Upload

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class HostStates:
    """Fields of RecurrentRows in host memory. A draft is one run with the token before it."""

    run_start_R1: np.ndarray
    slots_R: np.ndarray
    begins_R: np.ndarray
    num_single: int
    max_run: int
    recorded_rows_K: np.ndarray
    record_places_K: np.ndarray

    @staticmethod
    def of(
        sequences: SequenceOf[Sequence], firsts: SequenceOf[int], starts_S1: np.ndarray, num_record_tokens: int
    ) -> HostStates:
        """Return the states of a step.

        Its parts run tokens `firsts` and later ones of these sequences in rows `starts_S1`; consecutive parts of one
        sequence are one run. Of a sequence with a draft the inputs of all tokens but the last are recorded.
        """
        lengths, begin_of_run = np.diff(starts_S1).tolist(), []
        for part, (sequence, first) in enumerate(zip(sequences, firsts, strict=True)):
            follows = part and sequences[part - 1] is sequence and firsts[part - 1] + lengths[part - 1] == first
            if not follows:
                begin_of_run.append(part)
        runs = np.array([*begin_of_run, len(sequences)])
        run_start_R1 = np.ascontiguousarray(starts_S1[runs], dtype=np.int32)
        run_lengths = np.diff(run_start_R1)
        rows, places = [_NONE], [_NONE]
        for run, part in enumerate(begin_of_run):
            slot = sequences[part].kv.draft_slot
            if slot >= 0:
                count = np.arange(run_lengths[run] - 1, dtype=np.int64)
                rows.append(run_start_R1[run] + count)
                places.append(slot * num_record_tokens + count)
        return HostStates.of_runs(
            run_start_R1,
            np.array([sequences[part].kv.state_slot for part in begin_of_run], dtype=np.int64),
            np.array([firsts[part] for part in begin_of_run], dtype=np.int64) == 0,
            np.concatenate(rows),
            np.concatenate(places),
        )

    def part(self, first: int, end: int) -> HostStates:
        """Return the states of rows `first` to `end` - 1 of the step, which run after all rows before them."""
        starts = self.run_start_R1
        begin_r = int(np.searchsorted(starts, first, side="right")) - 1
        end_r = int(np.searchsorted(starts, end, side="left"))
        run_start_R1 = np.clip(starts[begin_r : end_r + 1], first, end) - first
        begins_R = self.begins_R[begin_r:end_r].copy()
        begins_R[0] &= bool(starts[begin_r] == first)  # otherwise its first rows are in the part before
        here = (self.recorded_rows_K >= first) & (self.recorded_rows_K < end)
        return HostStates.of_runs(
            run_start_R1,
            self.slots_R[begin_r:end_r],
            begins_R,
            self.recorded_rows_K[here] - first,
            self.record_places_K[here],
        )

    @staticmethod
    def of_runs(
        run_start_R1: np.ndarray,
        slots_R: np.ndarray,
        begins_R: np.ndarray,
        recorded_rows_K: np.ndarray,
        record_places_K: np.ndarray,
    ) -> HostStates:
        """Return the states of runs with these starts."""
        lengths = np.diff(run_start_R1)
        longer = np.flatnonzero(lengths != 1)
        num_single = int(longer[0]) if len(longer) else len(lengths)
        most = int(lengths.max())
        return HostStates(run_start_R1, slots_R, begins_R, num_single, most, recorded_rows_K, record_places_K)

    def upload(self, upload: Upload) -> RecurrentRows:
        """Return the rows on the device."""
        records = len(self.recorded_rows_K) > 0
        return RecurrentRows(
            upload(self.run_start_R1),
            upload(self.slots_R),
            upload(np.logical_not(self.begins_R).astype(np.int32)),
            self.num_single,
            self.max_run,
            upload(self.recorded_rows_K) if records else None,
            upload(self.record_places_K) if records else None,
        )


class StateCopier:
    """Copies of states between the slots of one rank's cache and its host slots, whose memory it owns, and replays."""

    def __init__(self, kv: KvCache, num_host_slots: int, layers: Mapping[int, RecurrentLayer]) -> None:
        """Create the copier. `layers`: the rank's recurrent layers by index, of which tokens are replayed."""
        self._kv, self._layers = kv, layers
        self._num_slots = kv.num_state_slots + num_host_slots
        pinned = any(part.is_cuda for layer in kv.states for part in layer.parts)
        self._parts = [
            (part, torch.empty(num_host_slots, *part.shape[1:], dtype=part.dtype, pin_memory=pinned))
            for layer in kv.states
            for part in layer.parts
        ]

    @torch.inference_mode()
    def run(self, group: int, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Run those of a plan's copies (source, target) that belong to this rank group, in their order.

        Each group's slots are numbered after those of the groups before it, those on the host after those on the
        device.
        """
        first = group * self._num_slots
        own = range(first, first + self._num_slots)
        for source, target in pairs:
            if source in own:
                for on_device, on_host in self._parts:
                    both = on_device, on_host, len(on_device)
                    _slot(*both, target - first).copy_(_slot(*both, source - first), non_blocking=True)

    @torch.inference_mode()
    def replay(self, group: int, replays: SequenceOf[tuple[int, int]]) -> None:
        """Advance the states in slots by their first recorded tokens: (slot, number of tokens), in this rank group."""
        begin = group * self._num_slots
        own = sorted(
            ((slot - begin, count) for slot, count in replays if begin <= slot < begin + self._num_slots),
            key=lambda one: one[1] > 1,
        )
        if not own or not self._layers:  # a pipeline stage may have no recurrent layer
            return
        slots, counts = zip(*own, strict=True)
        starts = np.concatenate(([0], np.cumsum(counts)))
        width = self._kv.num_record_tokens
        places = np.concatenate([slot * width + np.arange(count) for slot, count in own])
        device = self._kv.states[0].parts[0].device
        rows = RecurrentRows(
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(slots, device=device),
            torch.ones(len(slots), dtype=torch.int32, device=device),
            counts.count(1),
            max(counts),
        )
        places_K = torch.from_numpy(places).to(device)
        for index, layer in self._layers.items():
            of_layer = self._kv.layers[index]
            cache = of_layer.state if isinstance(of_layer, CompressedCache) else of_layer
            assert isinstance(cache, RecurrentStateCache)
            layer.replay([record.flatten(0, 1).index_select(0, places_K) for record in cache.records], rows, cache)


def _slot(on_device: Tensor, on_host: Tensor, num_slots: int, slot: int) -> Tensor:
    return on_device[slot] if slot < num_slots else on_host[slot - num_slots]
