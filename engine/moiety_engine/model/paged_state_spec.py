"""Base of the specs of layers that have a state of fixed size and entries in the sequence's blocks."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moiety_engine.model.recurrent_specs import RecurrentSpec

if TYPE_CHECKING:
    from moiety_engine.model.rope_spec import RopeSpec


@dataclass(frozen=True, slots=True)
class PagedStateSpec(RecurrentSpec):
    """Attention to entries in blocks, with a state beside them. `rope`: the rotary embedding of the entries."""

    rope: RopeSpec

    @property
    @abstractmethod
    def entry_widths(self) -> tuple[int, ...]:
        """Widths of an entry's parts; (): the layer keeps nothing in blocks."""

    @abstractmethod
    def entries_of(self, block_size: int) -> int:
        """Return the places for entries in a block of `block_size` tokens."""

    @property
    def tokens_per_entry(self) -> int:
        """Tokens of an entry, which is in the block of the last of them."""
        return 1

    @property
    def heads_in_entries(self) -> int:
        """Key-value heads, if the entries of a block are keys and values of its tokens; 0 if they are not."""
        return 0

    def block_values(self, block_size: int) -> int:
        """Return the values that a block of `block_size` tokens has of this layer."""
        return self.entries_of(block_size) * sum(self.entry_widths)
