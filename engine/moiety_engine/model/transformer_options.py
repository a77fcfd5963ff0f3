"""Options of a Transformer that are not part of its spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moiety_engine.distribution.collectives import SINGLE_RANK_GROUPS, Ranks
from moiety_engine.model.arithmetic import Arithmetic
from moiety_wire.engine_choices import ExpertAll2All

if TYPE_CHECKING:
    import torch

    from moiety_engine.offload.cache import ExpertCache

_PLAIN = Arithmetic()


@dataclass(frozen=True, slots=True)
class TransformerOptions:
    """Arithmetic, ranks and caches of a Transformer.

    `kv_dtype`: type of the KV cache; None: that of the activations. `expert_bytes`: bytes of one expert of a layer,
    given if this rank may have no experts. `expert_cache`: cache whose slots are the weights' experts. `keeps_hidden`:
    the KV cache also keeps the hidden state of each token, for an MTP layer. `frees_windows`: blocks behind sliding
    windows may be freed; see `cache_groups`. `expert_all2all`: how ranks with different tokens exchange
    them for experts.
    """

    kv_dtype: torch.dtype | None = None
    arithmetic: Arithmetic = _PLAIN
    ranks: Ranks = SINGLE_RANK_GROUPS
    expert_bytes: int | None = None
    expert_cache: ExpertCache | None = None
    keeps_hidden: bool = False
    frees_windows: bool = False
    expert_all2all: ExpertAll2All = ExpertAll2All.AUTO
