"""How many ranks there are and what each of them has of a model. Pure.

A model's ranks lie on a mesh of pipeline stages × data-parallel attention × tensor parallel, the last one varying
fastest. The ranks of one stage share its experts: there are `ep` parts of them, and each expert of a part is cut among
the ranks that the part has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moiety_engine.config import Batching
from moiety_engine.errors import InvalidConfig

if TYPE_CHECKING:
    from moiety_engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """Raises InvalidConfig where the numbers cannot go together."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.dp, self.ep, self.pp) < 1:
            raise InvalidConfig("--tp, --dp-attention, --ep and --pp must each be at least 1")
        if self.stage_size % self.ep:
            raise InvalidConfig(
                f"--ep {self.ep} does not divide the {self.stage_size} ranks that --dp-attention {self.dp} × --tp "
                f"{self.tp} make: the experts lie on those same ranks, so choose an --ep that divides their number"
            )

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.tp

    @property
    def num_ranks(self) -> int:
        return self.pp * self.stage_size


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place on the mesh."""

    layout: Layout = Layout()
    rank: int = 0

    @property
    def tp_rank(self) -> int:
        return self.rank % self.layout.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.layout.tp % self.layout.dp

    @property
    def pp_rank(self) -> int:
        return self.rank // self.layout.stage_size

    def layers_of(self, num_layers: int) -> range:
        """The layers that its stage has of so many; no stage has more than the first one."""
        pp = self.layout.pp
        return range(-(-num_layers * self.pp_rank // pp), -(-num_layers * (self.pp_rank + 1) // pp))

    @property
    def ep_rank(self) -> int:
        """Which part of the experts it has."""
        return self.rank % self.layout.stage_size // self.expert_cuts

    @property
    def expert_cuts(self) -> int:
        """Among how many ranks each expert is cut."""
        return self.layout.stage_size // self.layout.ep

    @property
    def cut_rank(self) -> int:
        """Which piece of each of its experts it has."""
        return self.rank % self.layout.stage_size % self.expert_cuts


ONLY_SEAT = Seat()


def layout_of(config: EngineConfig) -> Layout:
    """What the settings ask for. Raises InvalidConfig."""
    layout = Layout(config.tp, config.dp_attention, config.ep, config.pp)
    if config.batch_invariant and layout.num_ranks > 1:
        raise InvalidConfig(
            "--batch-invariant cannot be had over several ranks, whose sums depend on how much is summed: leave it out"
        )
    if config.batching is Batching.PADDED and layout.dp > 1:
        raise InvalidConfig(
            "padded batching starts a batch at once in one cache, and --dp-attention makes one of each group: choose "
            "another --batching, or leave out --dp-attention"
        )
    return layout
