"""Control messages of rank 0 about experts that move between ranks, and about the number of expert ranks."""

from __future__ import annotations

import msgspec

from moiety_placement.transition import Write


class BeginExpertMove(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Transfer the weights of other experts for slots of a layer into spare buffers, while steps run."""

    layer: int
    writes: list[Write]


class EndExpertMove(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Write the transferred experts into the slots and switch the table; without `commits`, discard them."""

    commits: bool


class PrepareExpertRanks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Prepare another number of expert ranks in the background. `generation` counts these changes."""

    num_ranks: int
    generation: int


class SwitchExpertRanks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Use the prepared layout from the next message on, which is sent over its groups; without `commits`, discard it.

    A rank that is not in the layout ends.
    """

    commits: bool


ExpertMessage = BeginExpertMove | EndExpertMove | PrepareExpertRanks | SwitchExpertRanks
