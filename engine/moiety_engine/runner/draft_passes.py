"""Passes of a draft model or of MTP layers on one rank: weights, KV caches, and the hidden states between passes.

Rank 0 plans each pass and samples its tokens; all ranks compute the same passes in the same order. Pass i runs MTP
layer i; further passes run the last layer.

T tokens of the pass, L rows that get a draft token, D model width, N blocks, P tokens a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

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
    """A rank's share of the draft model or of the MTP layers. `lag` is 1 for MTP layers, otherwise 0."""

    def __init__(self, models: tuple[Transformer, ...], staging: Staging) -> None:
        self.models, self.model = models, models[0]
        self.lag = int(self.model.spec.mtp_after is not None)
        self._reads_model = self.model.spec.mtp_reads_model
        self.staging = staging
        self._builder: BatchBuilder | None = None
        self._kvs: list[KvCache] = []  # of each layer
        self._made_NPD: Tensor | None = None  # the served model's hidden states
        self._own_TD: Tensor | None = None  # this group's hidden states of the pass before, all rows or wanted rows
        self._sampled_L: Tensor | None = None  # tokens of the running step
        self._drafted: list[Tensor] = []  # tokens of each pass of this step

    def allocate(self, kv: KvCache, num_blocks: int, block_size: int) -> None:
        """Allocate the caches: `num_blocks` blocks, one for each block of `kv`, the served model's cache.

        Raises OutOfMemory.
        """
        self._builder = BatchBuilder(block_size, self.model.device, self.staging)
        self._made_NPD = None if kv.hidden is None else kv.hidden.rows_NPL
        if self._made_NPD is not None:
            self._made_NPD[: -(-SIZES[-1] // block_size)] = 0  # timed passes read them before any token is there
        try:
            self._kvs = [model.allocate_kv(num_blocks, block_size) for model in self.models]
        except RuntimeError as exc:  # torch raises this on a CPU
            gib = num_blocks * sum(model.kv_bytes_per_block(block_size) for model in self.models) / 2**30
            raise OutOfMemory(
                f"the draft model's KV cache of {gib:.2f} GiB does not fit on {self.model.device}: lower "
                "--kv-memory-bytes, which covers both models"
            ) from exc

    def release(self) -> None:
        """Release the caches."""
        self._kvs, self._drafted = [], []
        self._made_NPD = self._own_TD = self._sampled_L = self._builder = None

    def begin(self, sampled_L: Tensor | None) -> None:
        """Begin a step's passes. `sampled_L`: tokens that the running step samples."""
        self._own_TD, self._sampled_L, self._drafted = None, sampled_L, []
        self.staging.begin_step()

    def add_drafted(self, token_L: Tensor) -> None:
        """Add the tokens of the newest pass, of the rows of all groups."""
        self._drafted.append(token_L)

    def model_of(self, number: int) -> Transformer:
        """Return the draft model or MTP layer that pass `number` of a step runs."""
        return self.models[min(number, len(self.models) - 1)]

    def run(self, host: HostBatch, number: int, spread: Spread | None) -> Tensor:
        """Run pass `number` of this rank's group; return hidden_LD of wanted rows, on rank 0 those of all groups."""
        assert self._kvs and self._builder is not None, "a draft was requested from an unloaded model"
        num_layers = len(self.models)
        batch = self._builder.upload(host, self._pending_tokens(number), spread)
        model, kv = self.model_of(number), self._kvs[min(number, num_layers - 1)]
        before_TD = self._before(batch.slots_T, number)
        if number + 1 >= num_layers or self._reads_model:  # the next pass reads no other rows than the wanted ones
            own_LD = self._own_TD = model.own_hidden(batch, kv, before_TD=before_TD)
        else:
            all_rows_T = torch.arange(len(batch.slots_T), device=model.device)
            self._own_TD = model.own_hidden(replace(batch, wanted_rows_L=all_rows_T), kv, before_TD=before_TD)
            own_LD = self._own_TD.index_select(0, batch.wanted_rows_L)
        return model.gather_groups(own_LD, batch)

    def _pending_tokens(self, number: int) -> Tensor | None:
        """Return the tokens that pending rows of a pass refer to.

        A pass of a further MTP layer reads those of all passes before it, and after them those of the running step.
        """
        if not number or not self._drafted:
            return self._sampled_L
        if number >= len(self.models):
            return self._drafted[-1]
        return torch.cat(self._drafted if self._sampled_L is None else [*self._drafted, self._sampled_L])

    def _before(self, slots_T: Tensor, number: int) -> Tensor | None:
        """Return the hidden states that the MTP layer reads with the tokens; None for a draft model."""
        if not self.lag:
            return None
        if number >= len(self.models) or (number and not self._reads_model):
            assert self._own_TD is not None, "a pass after the first one reads the hidden states of the one before"
            return self._own_TD[: len(slots_T)]
        assert self._made_NPD is not None, "the model's cache does not keep hidden states"
        return self._made_NPD.flatten(0, 1).index_select(0, slots_T)
