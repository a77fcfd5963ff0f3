"""Draft model, or MTP layers of the served model: weights, KV caches, and their part of a step.

It proposes one token per pass for all sequences that get a draft at once, each from the token of the pass before,
without the host in between. Tokens are drawn like those of the served model, with the same random number for the same
position, so that two models with similar distributions draw the same token at any temperature. Penalties count the
tokens before the draft only, and adapters are ignored; neither changes which tokens are output.

An MTP layer reads each token together with the served model's hidden state of the token before it, which the KV cache
keeps. Of several layers, each proposes one token: layer i reads the token i positions further ahead, at the same
positions as the first one, with the hidden states of layer i - 1, or again those of the model in some families. After
the last layer, it is run again with its own hidden state for each further token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from moiety_engine.messages import CoreSubmit
from moiety_engine.model.batch import KvCache, Spread
from moiety_engine.model.transformer import Transformer
from moiety_engine.mtp_and_draft_model.draft_rows import DraftChunk, DraftRows
from moiety_engine.runner.block_tables import BlockTables
from moiety_engine.runner.control_messages import ControlSender
from moiety_engine.runner.draft_passes import DraftPasses
from moiety_engine.runner.group_results import spread_of
from moiety_engine.runner.inputs import HostBatch
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
    """Draft model or MTP layers with their KV caches. Used by the step loop's thread only.

    `model` is the first one of `models`; only MTP layers are several. `held` tracks the contents of the caches; the
    scheduler reads it.
    """

    def __init__(
        self, models: tuple[Transformer, ...], sizes: Sizes, clock_ns: Callable[[], int], controls: ControlSender
    ) -> None:
        self.models, self.model = models, models[0]
        model = self.model
        self._sizes, self._clock_ns, self._controls = sizes, clock_ns, controls
        self._staging = Staging(model.device)
        self._passes = DraftPasses(models, self._staging)
        self.held = DraftedKv(sizes.block_size, self._passes.lag, len(models))
        self.proposer = DraftModelProposer(self.held, model.spec.max_context_tokens)
        self._sampler = Sampler(model.spec.vocab_size, model.device, self._staging)
        self._tables = BlockTables()

    def allocate(self, kv: KvCache) -> None:
        """Allocate the caches: one block for each block of `kv`, the served model's cache. Raises OutOfMemory."""
        self.held.forget()
        self._passes.allocate(kv, self._sizes.num_blocks, self._sizes.block_size)

    def release(self) -> None:
        """Release the caches."""
        self._passes.release()

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
        rows = self._rows(pieces)
        drafts = self._run(rows, sampled_L)
        drafted = {piece.sequence: draft for piece, draft in zip(rows.drafting, drafts, strict=True)}
        for piece in rows.pieces:
            num_guessed = len(self.models) - 1 if piece.drafts else 0
            proposed = drafted.get(piece.sequence, [])[:-1]
            self.held.record_computed(piece.sequence, piece.first, piece.end, proposed, num_guessed)
        chunks = [
            chunk._replace(draft=tuple(drafted[chunk.sequence])) if chunk.draft else chunk
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
        blank = CoreSubmit(0, "", STANDARD, [0] * (SIZES[-1] + self._passes.lag), Sampling(), 1, 0, [], 1, b"", 0)
        sequence, sizes, found = Sequence(blank, order=0, seed=0), self._sizes, []
        begin_ns = clock_ns()
        for size in SIZES:
            if size > sizes.num_blocks * sizes.block_size:
                break
            sequence.kv.blocks = list(range(-(-size // sizes.block_size)))
            times_s = []
            for _ in range(_TIMED):
                one_by_one = [DraftChunk(sequence, place, place + 1, drafts=1) for place in range(size)]
                began_ns = clock_ns()
                self._run(self._rows(one_by_one), None)
                times_s.append((clock_ns() - began_ns) / 1e9)
            found.append(min(times_s))
            if (clock_ns() - begin_ns) / 1e9 > _TIMING_S:
                break
        self.proposer.passes.measured(found)

    def _piece(self, sequence: Sequence, at_most: int | None, drafts: int = 0) -> DraftChunk:
        first, end = self.held.num_there(sequence), len(sequence.tokens) - self._passes.lag
        if at_most is None:
            return DraftChunk(sequence, first, end, drafts)
        end -= len(self.models) - 1  # the tokens that further layers read are not drafted here
        return DraftChunk(sequence, first, min(end, first + at_most), drafts)

    def _rows(self, pieces: Iterable[DraftChunk]) -> DraftRows:
        num_groups = self.model.ranks.num_cache_groups
        sizes = self._sizes.block_size, self._tables, self._passes.lag, num_groups, len(self.models)
        return DraftRows(pieces, *sizes)

    @torch.inference_mode()
    def _run(self, rows: DraftRows, sampled_L: Tensor | None) -> list[list[int]]:
        """Run all passes on all ranks; return the draft tokens of each sequence in `rows.drafting`."""
        passes = self._passes
        passes.begin(sampled_L)
        drafted_rows = [DraftedRow(piece.sequence) for piece in rows.drafting]
        downloads: list[Tensor] = []
        hosts, before_L, number = rows.first_pass(), None, 0
        with one_torch_thread() if self.model.only_kernels else contextlib.nullcontext():
            while hosts:
                self._controls.draft_pass(hosts, number, before_L)
                hidden_LD = passes.run(hosts[0], number, self._spread(hosts))
                if drafted_rows:
                    wanting = [drafted_rows[row].after(number) for row in rows.wanting(number)]
                    drawn = self._sampler.sample(passes.model_of(number).logits(hidden_LD), wanting, sampled_L)
                    downloads.append(self._staging.download(drawn.token_L))
                    before_L = drawn.token_L
                    passes.add_drafted(before_L)
                number += 1
                hosts = rows.next_pass(number)
        self._staging.mark().wait()
        drafts: list[list[int]] = [[] for _ in rows.drafting]
        for number, token_L in enumerate(downloads):
            for row, token in zip(rows.wanting(number), token_L.tolist(), strict=True):
                drafts[row].append(token)
        return [draft[: piece.drafts] for draft, piece in zip(drafts, rows.drafting, strict=True)]

    def _spread(self, hosts: list[HostBatch]) -> Spread | None:
        if len(hosts) == 1:
            return None
        num_rows = sum(len(host.wanted_rows_L) for host in hosts)
        return spread_of(hosts, self._staging.upload(np.arange(num_rows)))
