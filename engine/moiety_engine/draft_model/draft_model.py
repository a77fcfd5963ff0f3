"""Draft model, or MTP layer of the served model: its weights, its KV cache, and its part of a step.

It proposes one token per pass for all sequences that get a draft at once, each from the token of the pass before,
without the host in between. Tokens are drawn like those of the served model, with the same random number for the same
position, so that two models with similar distributions draw the same token at any temperature. Penalties count the
tokens before the draft only, and adapters are ignored; neither changes which tokens are output.

An MTP layer reads each token together with the served model's hidden state of the token before it, which the KV cache
keeps; in the passes after the first it reads its own hidden state instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moiety_engine.draft_model.rows import DraftChunk, DraftRows
from moiety_engine.errors import OutOfMemory
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.batch import Batch, KvCache
from moiety_engine.model.transformer import Transformer
from moiety_engine.runner.block_tables import BlockTables
from moiety_engine.runner.inputs import BatchBuilder, HostBatch
from moiety_engine.runner.runner import one_torch_thread
from moiety_engine.runner.sizes import Sizes
from moiety_engine.sampling import Sampler
from moiety_engine.sampling.rows import DraftedRow
from moiety_engine.scheduling.plan import Plan
from moiety_engine.scheduling.speculative_decoding.costs import SIZES
from moiety_engine.scheduling.speculative_decoding.draft_model_proposer import DraftModelProposer
from moiety_engine.scheduling.speculative_decoding.drafted_kv import DraftedKv
from moiety_engine.sequence import PENDING, Sequence
from moiety_engine.staging import Staging
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

_TIMED = 5  # passes per size; the first ones record the graph or program that the others replay
_TIMING_S = 1.0


class DraftModel:
    """Draft model with its KV cache. Used by the step loop's thread only.

    `held` tracks the contents of the cache; the scheduler reads it.
    """

    def __init__(self, model: Transformer, sizes: Sizes, clock_ns: Callable[[], int]) -> None:
        self.model = model
        self._sizes, self._clock_ns = sizes, clock_ns
        self._lag = lag = int(model.spec.mtp_after is not None)
        self.held = DraftedKv(sizes.block_size, lag)
        self.proposer = DraftModelProposer(self.held, model.spec.max_context_tokens)
        self._staging = Staging(model.device)
        self._builder = BatchBuilder(sizes.block_size, model.device, self._staging)
        self._sampler = Sampler(model.spec.vocab_size, model.device, self._staging)
        self._tables = BlockTables()
        self._kv: KvCache | None = None
        self._made_NPD: Tensor | None = None  # the served model's hidden states

    def allocate(self, kv: KvCache) -> None:
        """Allocate the cache: one block for each block of `kv`, the served model's cache. Raises OutOfMemory."""
        sizes = self._sizes
        self.held.forget()
        self._made_NPD = None if kv.hidden is None else kv.hidden.rows_NPL
        try:
            self._kv = self.model.allocate_kv(sizes.num_blocks, sizes.block_size)
        except RuntimeError as exc:  # torch raises this on a CPU
            gib = sizes.num_blocks * self.model.kv_bytes_per_block(sizes.block_size) / 2**30
            raise OutOfMemory(
                f"the draft model's KV cache of {gib:.2f} GiB does not fit on {self.model.device}: lower "
                "--kv-memory-bytes, which covers both models"
            ) from exc

    def release(self) -> None:
        """Release the cache."""
        self._kv = self._made_NPD = None

    def fill(self, plan: Plan, sampled_L: Tensor | None) -> Plan:
        """Prefill the draft model as the plan says, and return the plan with its pending draft tokens filled in.

        `sampled_L`: tokens that the running step samples. Waits for the draft tokens; the step begins only then.
        """
        if not plan.wants_drafts:
            return plan
        begin_ns = self._clock_ns()
        pieces = [self._piece(taken.sequence, taken.num_tokens) for taken in plan.catch_ups]
        pieces += [
            self._piece(chunk.sequence, None, len(chunk.draft))
            for chunk in plan.chunks[: plan.num_decode]
            if PENDING in chunk.draft
        ]
        rows = DraftRows(pieces, self._sizes.block_size, self._tables, self._lag)
        drafts = self._run(rows, sampled_L)
        said = {piece.sequence: draft for piece, draft in zip(rows.drafting, drafts, strict=True)}
        for piece in rows.pieces:
            self.held.record_computed(piece.sequence, piece.first, piece.end, said.get(piece.sequence, [])[:-1])
        chunks = [
            chunk._replace(draft=tuple(said[chunk.sequence])) if chunk.draft else chunk
            for chunk in plan.chunks[: plan.num_decode]
        ]
        end_ns = self._clock_ns()
        self.proposer.passes.record_seconds((end_ns - begin_ns) / 1e9)
        return replace(plan, chunks=chunks + plan.chunks[plan.num_decode :], planned_ns=end_ns)

    def warm_up(self) -> None:
        """Measure the duration of passes, for as many batch sizes as time allows.

        Also records the graphs or programs that replay these passes. Leaves no state behind; call it only before the
        first request.
        """
        clock_ns = self._clock_ns
        blank = CoreSubmit(0, "", STANDARD, [0] * (SIZES[-1] + self._lag), Sampling(), 1, 0, [], 1, b"", 0)
        sequence, sizes, found = Sequence(blank, order=0, seed=0), self._sizes, []
        begin_ns = clock_ns()
        for size in SIZES:
            if size > sizes.num_blocks * sizes.block_size:
                break
            sequence.kv.blocks = list(range(-(-size // sizes.block_size)))
            if self._made_NPD is not None:
                self._made_NPD[sequence.kv.blocks] = 0  # no token has a hidden state yet
            times_s = []
            for _ in range(_TIMED):
                one_by_one = [DraftChunk(sequence, place, place + 1, drafts=1) for place in range(size)]
                began_ns = clock_ns()
                self._run(DraftRows(one_by_one, sizes.block_size, self._tables, self._lag), None)
                times_s.append((clock_ns() - began_ns) / 1e9)
            found.append(min(times_s))
            if (clock_ns() - begin_ns) / 1e9 > _TIMING_S:
                break
        self.proposer.passes.measured(found)

    def _piece(self, sequence: Sequence, at_most: int | None, drafts: int = 0) -> DraftChunk:
        first, end = self.held.num_there(sequence), len(sequence.tokens) - self._lag
        return DraftChunk(sequence, first, end if at_most is None else min(end, first + at_most), drafts)

    @torch.inference_mode()
    def _run(self, rows: DraftRows, sampled_L: Tensor | None) -> list[list[int]]:
        """Run all passes; return the draft tokens of each sequence in `rows.drafting`."""
        self._staging.begin_step()
        drafted_rows = [DraftedRow(piece.sequence) for piece in rows.drafting]
        said: list[Tensor] = []
        host: HostBatch | None = rows.first_pass()
        hidden_LD: Tensor | None = None
        before_L, number = sampled_L, 0
        with one_torch_thread() if self.model.only_kernels else contextlib.nullcontext():
            while host is not None:
                hidden_LD = self._pass(self._builder.upload(host, before_L), hidden_LD)
                if not drafted_rows:
                    break
                wanting = [one.after(number) for one in drafted_rows[: len(hidden_LD)]]
                drawn = self._sampler.sample(self.model.logits(hidden_LD), wanting, sampled_L)
                said.append(self._staging.download(drawn.token_L))
                before_L, number = drawn.token_L, number + 1
                host = rows.next_pass(number)
        self._staging.mark().wait()
        by_pass = [token_L.tolist() for token_L in said]
        return [[tokens[row] for tokens in by_pass[: piece.drafts]] for row, piece in enumerate(rows.drafting)]

    def _pass(self, batch: Batch, said_LD: Tensor | None) -> Tensor:
        """Return hidden_LD of the wanted rows. `said_LD`: that of the pass before; None in the first pass."""
        assert self._kv is not None, "a draft was requested from an unloaded model"
        if not self._lag:
            return self.model.hidden(batch, self._kv)
        if said_LD is None:
            assert self._made_NPD is not None, "the model's cache does not keep hidden states"
            before_TD = self._made_NPD.flatten(0, 1).index_select(0, batch.slots_T)
        else:
            before_TD = said_LD[: len(batch.slots_T)]
        return self.model.hidden(batch, self._kv, before_TD=before_TD)
