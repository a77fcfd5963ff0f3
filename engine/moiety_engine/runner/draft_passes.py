"""Passes of a draft model or MTP layer on one rank: its weights, its KV cache, and the hidden states between passes.

Rank 0 plans each pass and samples its tokens; all ranks compute the same passes in the same order.

T tokens of the pass, L rows that get a draft token, D model width, N blocks, P tokens a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.errors import OutOfMemory
from moiety_engine.runner.inputs import BatchBuilder
from moiety_engine.scheduling.speculative_decoding.costs import SIZES

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.batch import KvCache, Spread
    from moiety_engine.model.transformer import Transformer
    from moiety_engine.runner.inputs import HostBatch
    from moiety_engine.staging import Staging


class DraftPasses:
    """A rank's share of the draft model. `lag` is 1 for an MTP layer, otherwise 0."""

    def __init__(self, model: Transformer, staging: Staging) -> None:
        self.model = model
        self.lag = int(model.spec.mtp_after is not None)
        self.staging = staging
        self._builder: BatchBuilder | None = None
        self._kv: KvCache | None = None
        self._made_NPD: Tensor | None = None  # the served model's hidden states
        self._own_LD: Tensor | None = None  # this group's hidden states of the pass before

    def allocate(self, kv: KvCache, num_blocks: int, block_size: int) -> None:
        """Allocate the cache: `num_blocks` blocks, one for each block of `kv`, the served model's cache.

        Raises OutOfMemory.
        """
        self._builder = BatchBuilder(block_size, self.model.device, self.staging)
        self._made_NPD = None if kv.hidden is None else kv.hidden.rows_NPL
        if self._made_NPD is not None:
            self._made_NPD[: -(-SIZES[-1] // block_size)] = 0  # timed passes read them before any token is there
        try:
            self._kv = self.model.allocate_kv(num_blocks, block_size)
        except RuntimeError as exc:  # torch raises this on a CPU
            gib = num_blocks * self.model.kv_bytes_per_block(block_size) / 2**30
            raise OutOfMemory(
                f"the draft model's KV cache of {gib:.2f} GiB does not fit on {self.model.device}: lower "
                "--kv-memory-bytes, which covers both models"
            ) from exc

    def release(self) -> None:
        """Release the cache."""
        self._kv = self._made_NPD = self._own_LD = self._builder = None

    def begin(self) -> None:
        """Begin a step's passes: the next one reads the served model's hidden states."""
        self._own_LD = None
        self.staging.begin_step()

    def run(self, host: HostBatch, before_L: Tensor | None, spread: Spread | None) -> Tensor:
        """Run a pass of this rank's group; return hidden_LD of the wanted rows, on rank 0 those of all groups.

        `before_L`: the tokens that pending rows of `host` refer to.
        """
        assert self._kv is not None and self._builder is not None, "a draft was requested from an unloaded model"
        batch = self._builder.upload(host, before_L, spread)
        own_LD = self.model.own_hidden(batch, self._kv, before_TD=self._before(batch.slots_T))
        self._own_LD = own_LD
        return self.model.gather_groups(own_LD, batch)

    def _before(self, slots_T: Tensor) -> Tensor | None:
        """Return the hidden states that the MTP layer reads with the tokens; None for a draft model."""
        if not self.lag:
            return None
        if self._own_LD is not None:
            return self._own_LD[: len(slots_T)]
        assert self._made_NPD is not None, "the model's cache does not keep hidden states"
        return self._made_NPD.flatten(0, 1).index_select(0, slots_T)
