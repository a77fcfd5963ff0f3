"""Rows of a step as recurrent layers see them, in host memory, and copies of states between slots.

R runs, each of consecutive tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moiety_engine.model.batch import KvCache
from moiety_engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class HostStates:
    """Fields of RecurrentRows in host memory; a step's runs are its sequences, so they start where its queries do."""

    slots_R: np.ndarray
    begins_R: np.ndarray

    @staticmethod
    def of(sequences: SequenceOf[Sequence], firsts: SequenceOf[int]) -> HostStates:
        """Return the states of a step that runs tokens `firsts` and later ones of these sequences."""
        slots = [sequence.kv.state_slot for sequence in sequences]
        return HostStates(np.array(slots, dtype=np.int64), np.array(firsts, dtype=np.int64) == 0)


class StateCopier:
    """Copies of states between the slots of one rank's cache and its host slots, whose memory it owns."""

    def __init__(self, kv: KvCache, num_host_slots: int) -> None:
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


def _slot(on_device: Tensor, on_host: Tensor, num_slots: int, slot: int) -> Tensor:
    return on_device[slot] if slot < num_slots else on_host[slot - num_slots]
