"""A draft model beside the one that is served, or a layer of that one which foretells: its weights, its cache, and its
part of a step.

It says what the model is likely to say next, one token a pass, for all sequences that are to get a draft at once, each
from what it said in the pass before, without the host in between. Tokens are drawn as the model's will be, with the
same random number for the same place: two models that think alike then say the same, at any temperature. Penalties
count what was said before the draft, and it knows no adapters; neither changes what is accepted.

A layer that foretells reads each token beside what the model made of the one before it, which the model's cache keeps;
in the passes after the first, beside what it made of that itself.
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
from moiety_engine.sampling.rows import Foreseen
from moiety_engine.scheduling.plan import Plan
from moiety_engine.scheduling.speculative_decoding.costs import SIZES
from moiety_engine.scheduling.speculative_decoding.draft_model_proposer import DraftModelProposer
from moiety_engine.scheduling.speculative_decoding.drafted_kv import DraftedKv
from moiety_engine.sequence import PENDING, Sequence
from moiety_engine.staging import Staging
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

_TIMED = 5  # passes of a size, of which the first make what replays the others
_TIMING_S = 1.0


class DraftModel:
    """Used by the step loop's thread only. What it has in its cache is known by `held`, which is the scheduler's to
    read."""

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
        self._made_NPD: Tensor | None = None  # of each token, by the model that it drafts for

    def move_in(self, kv: KvCache) -> None:
        """Make the cache: a block for each of `kv`, the model's. Raises OutOfMemory."""
        sizes = self._sizes
        self.held.forget()
        self._made_NPD = None if kv.hidden is None else kv.hidden.rows_NPL
        try:
            self._kv = self.model.allocate_kv(sizes.num_blocks, sizes.block_size)
        except RuntimeError as exc:  # which is what torch raises on a CPU
            gib = sizes.num_blocks * self.model.kv_bytes_per_block(sizes.block_size) / 2**30
            raise OutOfMemory(
                f"the draft model's KV cache of {gib:.2f} GiB does not fit on {self.model.device}: lower "
                "--kv-memory-bytes, which is for both models"
            ) from exc

    def move_out(self) -> None:
        """Give the cache up."""
        self._kv = self._made_NPD = None

    def fill(self, plan: Plan, sampled_L: Tensor | None) -> Plan:
        """The plan with the drafts that it leaves to a model, which has taken in what the plan says. `sampled_L`: what
        the running step samples. Waits for the tokens; only then the step begins."""
        if not plan.wants_drafts:
            return plan
        begin_ns = self._clock_ns()
        pieces = [self._piece(taken.sequence, taken.num_tokens) for taken in plan.taken_in]
        pieces += [
            self._piece(chunk.sequence, None, len(chunk.draft))
            for chunk in plan.chunks[: plan.num_decode]
            if PENDING in chunk.draft
        ]
        rows = DraftRows(pieces, self._sizes.block_size, self._tables, self._lag)
        drafts = self._run(rows, sampled_L)
        said = {piece.sequence: draft for piece, draft in zip(rows.drafting, drafts, strict=True)}
        for piece in rows.pieces:
            self.held.took_in(piece.sequence, piece.first, piece.end, said.get(piece.sequence, [])[:-1])
        chunks = [
            chunk._replace(draft=tuple(said[chunk.sequence])) if chunk.draft else chunk
            for chunk in plan.chunks[: plan.num_decode]
        ]
        end_ns = self._clock_ns()
        self.proposer.passes.took((end_ns - begin_ns) / 1e9)
        return replace(plan, chunks=chunks + plan.chunks[plan.num_decode :], planned_ns=end_ns)

    def warm_up(self) -> None:
        """Measure passes of as many of the sizes of steps with drafts as time allows. What replays them is made on the
        way. Leaves nothing behind; only before the first request."""
        clock_ns = self._clock_ns
        blank = CoreSubmit(0, "", STANDARD, [0] * (SIZES[-1] + self._lag), Sampling(), 1, 0, [], 1, b"", 0)
        sequence, sizes, found = Sequence(blank, order=0, seed=0), self._sizes, []
        begin_ns = clock_ns()
        for size in SIZES:
            if size > sizes.num_blocks * sizes.block_size:
                break
            sequence.blocks = list(range(-(-size // sizes.block_size)))
            if self._made_NPD is not None:
                self._made_NPD[sequence.blocks] = 0  # nothing was made of any token yet
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
        """All passes; of each that gets a draft its tokens."""
        self._staging.turn()
        foreseen = [Foreseen(piece.sequence) for piece in rows.drafting]
        said: list[Tensor] = []
        host: HostBatch | None = rows.first_pass()
        hidden_LD: Tensor | None = None
        before_L, number = sampled_L, 0
        with one_torch_thread() if self.model.only_kernels else contextlib.nullcontext():
            while host is not None:
                hidden_LD = self._pass(self._builder.upload(host, before_L), hidden_LD)
                if not foreseen:
                    break
                wanting = [one.after(number) for one in foreseen[: len(hidden_LD)]]
                drawn = self._sampler.sample(self.model.logits(hidden_LD), wanting, sampled_L)
                said.append(self._staging.download(drawn.token_L))
                before_L, number = drawn.token_L, number + 1
                host = rows.next_pass(number)
        self._staging.mark().wait()
        by_pass = [token_L.tolist() for token_L in said]
        return [[tokens[row] for tokens in by_pass[: piece.drafts]] for row, piece in enumerate(rows.drafting)]

    def _pass(self, batch: Batch, said_LD: Tensor | None) -> Tensor:
        """hidden_LD of the rows that are wanted. `said_LD`: those of the pass before; None in the first."""
        assert self._kv is not None, "a draft is wanted of a model that has left"
        if not self._lag:
            return self.model.hidden(batch, self._kv)
        if said_LD is None:
            assert self._made_NPD is not None, "the model's cache does not keep what it made of tokens"
            before_TD = self._made_NPD.flatten(0, 1).index_select(0, batch.slots_T)
        else:
            before_TD = said_LD[: len(batch.slots_T)]
        return self.model.hidden(batch, self._kv, before_TD=before_TD)
