"""Pass of a pipeline stage whose results are still at later stages.

L rows whose results are wanted, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moiety_engine.distribution.collectives import PendingReceive
    from moiety_engine.model.batch import Batch


@dataclass(frozen=True, slots=True)
class PendingPass:
    """Pass that this stage has computed. `Transformer.end_pass` waits for the last stage."""

    batch: Batch
    hidden: PendingReceive[Tensor]  # hidden_LD of this rank's group
    count_experts: Callable[[], None]  # counts the chosen experts of all stages, once they have arrived
