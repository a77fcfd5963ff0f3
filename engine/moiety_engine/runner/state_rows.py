"""Rows of a step as recurrent layers see them, in host memory, and copies of states between slots.

R runs, each of consecutive tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

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


@torch.inference_mode()
def copy_states(kv: KvCache, group: int, pairs: SequenceOf[tuple[int, int]]) -> None:
    """Run those of a plan's copies (source, target) that belong to this rank group, in their order.

    Each group's slots are numbered after those of the groups before it.
    """
    first = group * kv.num_state_slots
    own = range(first, first + kv.num_state_slots)
    for source, target in pairs:
        if source in own:
            for layer in kv.states:
                for part in layer.parts:
                    part[target - first].copy_(part[source - first])
