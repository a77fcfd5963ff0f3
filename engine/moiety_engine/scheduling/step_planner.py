"""Step under construction: rows, chunks, and the prefix blocks that the step will complete."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from moiety_engine.images.encoder_cost import EncoderWork, ImageEncoding
from moiety_engine.scheduling.kv.kv_groups import KvGroups
from moiety_engine.scheduling.plan import Chunk, DraftCatchUp, Plan
from moiety_engine.scheduling.policies.policy_interface import StepBudget
from moiety_engine.scheduling.step_time.step_time_model import StepShape, StepTimeModel
from moiety_engine.sequence import Sequence


class StepPlanner:
    """Adds chunks as long as rows, blocks and the step's time allow.

    It is used for one step. Sequences in the step may not lose their blocks unless they are dropped from it first.
    """

    def __init__(
        self,
        kv: KvGroups,
        budget_rows: int,
        step_time: StepTimeModel,
        max_answer_rows: int | None = None,
        encoder_work: EncoderWork | None = None,
    ) -> None:
        """Create an empty step.

        `max_answer_rows` limits the output tokens in a step, decoded or recomputed; None means no limit. Each rank
        group gets an equal part of the rows, and prefill takes what decodes leave of it. `encoder_work` counts the
        encoding of images as rows; None for a model without an encoder.
        """
        self._kv = kv
        self._answer_rows_left = max_answer_rows
        self._budget_rows = budget_rows
        self._rows_of_group = -(-budget_rows // kv.count)
        self._taken_of_group = [0] * kv.count
        self._step_time = step_time
        self._budget: StepBudget | None = None
        self._decodes: list[Chunk] = []
        self._decoding: set[Sequence] | None = None  # built on first use
        self._prefills: dict[Sequence, Chunk] = {}
        self._completing: list[tuple[Sequence, int]] = []  # (sequence, end token) of the prefills
        # By (group, block index): hashes of the blocks that the prefills complete, and the number of these prefills.
        self._in_flight: dict[tuple[int, int], tuple[set[bytes], int]] = {}
        self._decode_context = 0
        self.num_drafted = 0
        self._catch_ups: list[DraftCatchUp] = []
        self._prefill_rows = 0
        self._max_prefill_rows = budget_rows
        self._encoder_work = encoder_work
        self._encoder_rows = 0
        self._encoded: set[bytes] = set()  # keys of the images that the step encodes
        self._attended_pairs = 0
        self._shape: StepShape | None = None  # None: outdated
        self.num_rows = 0

    @property
    def empty(self) -> bool:
        return not self._decodes and not self._prefills

    @property
    def completes_blocks(self) -> bool:
        """True if the step has prefill so far, whose blocks `will_compute` finds."""
        return bool(self._completing)

    @property
    def groups(self) -> set[int]:
        """Rank groups that have chunks in the step."""
        return {chunk.sequence.kv.group for chunk in (*self._decodes, *self._prefills.values())}

    @property
    def decodes(self) -> list[Chunk]:
        return self._decodes

    @property
    def rows_left(self) -> int:
        return self._budget_rows - self.num_rows - self._encoder_rows

    @property
    def prefill_rows_left(self) -> int:
        """Rows that prefill may still take."""
        of_step, of_prefill = self._budget_rows - self.num_rows, self._max_prefill_rows - self._prefill_rows
        return (of_step if of_step < of_prefill else of_prefill) - self._encoder_rows

    @property
    def shape(self) -> StepShape:
        if self._shape is None:
            self._shape = StepShape(
                len(self._decodes) + self.num_drafted,
                self._prefill_rows + self._encoder_rows,
                self._decode_context,
                self._attended_pairs,
            )
        return self._shape

    def limit_prefill(self, max_rows: int) -> None:
        """Limit the rows of prefill, because other steps get the other rows."""
        self._max_prefill_rows = max_rows

    def limit_time(self, budget: StepBudget | None) -> None:
        self._budget = budget

    def lift_rank_limit(self) -> bool:
        """Give prompts of worse ranks the budget of the best one. Return whether they had another one."""
        if self._budget is None or self._budget.of_worse_ranks is None:
            return False
        self._budget = replace(self._budget, of_worse_ranks=None)
        return True

    def will_compute(self, block_hash: bytes | None, index: int, group: int = 0) -> bool:
        """Return whether this step fills the block with this hash in the group, so that the next step can hit it.

        `index` is the block's index in its sequence. Equal hashes have equal indices, so only the blocks with this
        index need their hashes now.
        """
        completing = self._completing
        if block_hash is None or not completing:
            return False
        hashes, num_seen = self._in_flight.get((group, index)) or (set[bytes](), 0)
        if num_seen < len(completing):
            for sequence, end in completing[num_seen:]:
                if sequence.kv.group == group:
                    found = self._kv.of(sequence).completed_hash(sequence, index, end)
                    if found is not None:
                        hashes.add(found)
            self._in_flight[group, index] = hashes, len(completing)
        return block_hash in hashes

    def prefills(self, sequence: Sequence) -> bool:
        return sequence in self._prefills

    def add_decodes(self, chunks: list[Chunk], context: int) -> None:
        """Add one row for each decoding sequence or padding row; blocks are allocated.

        `context` is the total number of tokens whose KV the rows read.
        """
        self._decodes = self._decodes + chunks if self._decodes else chunks
        self._decoding = self._shape = None
        self._decode_context += context
        self.num_rows += len(chunks)
        if self._answer_rows_left is not None:
            self._answer_rows_left -= len(chunks)
        if self._kv.count > 1:
            for chunk in chunks:
                self._taken_of_group[chunk.sequence.kv.group] += 1

    def drop_decode(self, sequence: Sequence) -> None:
        """Remove the sequence's decode from this step, so that it can be preempted."""
        if self._decodes_now(sequence):
            self._decodes = [chunk for chunk in self._decodes if chunk.sequence is not sequence]
            self._decoding = self._shape = None
            self._decode_context -= sequence.kv.num_computed
            self.num_rows -= 1
            self._taken_of_group[sequence.kv.group] -= 1
            self._take_answer_rows(-1)

    def draft(self, place: int, draft: list[int]) -> None:
        """Let a decode of this step verify a draft, cut to the available rows and blocks.

        Free blocks that other decodes may need are left to them. Nothing may be added to the step afterwards.
        """
        sequence = self._decodes[place].sequence
        first, kv = sequence.kv.num_computed, self._kv.of(sequence)
        num_spare = max(0, kv.pool.num_free - len(self._decodes) * kv.num_tables) // kv.num_tables
        tokens_left = (len(sequence.kv.blocks) + num_spare) * kv.block_size - first - 1
        limit = min(len(draft), self.rows_left, tokens_left)
        if self._answer_rows_left is not None:
            limit = min(limit, self._answer_rows_left)
        if limit <= 0 or not kv.begin_draft(sequence):
            return
        grown = kv.grow(sequence, first + 1 + limit)
        assert grown, "blocks that were free are not there"
        self._decodes[place] = Chunk(sequence, 1 + limit, True, draft=tuple(draft[:limit]))
        self._shape = None
        self.num_rows += limit
        self.num_drafted += limit
        self._decode_context += limit * first
        self._take_answer_rows(limit)

    def add_catch_up(self, place: int, num_tokens: int) -> None:
        """Let a draft model process tokens of a decode of this step that it has not seen."""
        self._catch_ups.append(DraftCatchUp(self._decodes[place].sequence, num_tokens))

    def max_prefill_tokens(self, sequence: Sequence) -> int:
        """Return how many of the sequence's uncomputed tokens fit into the rows and the step's time."""
        limit = min(sequence.num_uncomputed, self.prefill_rows_left)
        if self._kv.count > 1:
            limit = min(limit, self._rows_of_group - self._taken_of_group[sequence.kv.group])
        if self._answer_rows_left is not None:
            prompt_left = max(0, sequence.request.num_prompt - sequence.kv.num_computed)
            limit = min(limit, prompt_left + max(0, self._answer_rows_left))
        if limit <= 0:
            return 0
        budget = None if self._budget is None else self._budget.for_class(sequence.service)
        if sequence.request.images is not None and (encodings := self._encodings(sequence, limit)):
            return self._tokens_with_images(sequence, limit, encodings, budget)
        return limit if budget is None else self._tokens_in_time(sequence, limit, budget, self.shape)

    def add_prefill(self, sequence: Sequence, limit: int) -> bool:
        """Add as many of the sequence's uncomputed tokens as `limit` and free blocks allow, possibly none.

        Return whether its tokens are complete with this step.
        """
        kv = self._kv.ledgers[sequence.kv.group]
        tokens_left = kv.available_tokens(sequence) - sequence.kv.num_computed
        num_tokens = min(limit, tokens_left)
        if num_tokens <= 0:
            return False
        state = sequence.kv
        first = state.num_computed
        if state.snapshot_ends:  # the state after a block is known only where a chunk ends
            num_tokens = min(num_tokens, state.snapshot_ends[0] * kv.block_size - first)
        if kv.answers_apart and kv.states is not None and first < sequence.request.num_prompt:
            num_tokens = min(num_tokens, sequence.request.num_prompt - first)  # a step runs its output tokens first
        end = first + num_tokens
        grown = kv.grow(sequence, end)
        assert grown, "available_tokens counted blocks that are not free"
        ends = end == len(sequence.tokens)
        pad = 0
        if ends and sequence.padded_row.length > end:
            pad = min(sequence.padded_row.length - end, max(0, self.rows_left - num_tokens))
            pad = min(pad, len(state.blocks) * kv.block_size - end)
        self._shape = None
        self._completing.append((sequence, min(end, sequence.num_known)))
        embeds = ends and sequence.request.submit.embed
        self._prefills[sequence] = Chunk(sequence, num_tokens, ends and not embeds, pad, embeds)
        self.num_rows += num_tokens + pad
        self._taken_of_group[state.group] += num_tokens + pad
        self._prefill_rows += num_tokens + pad
        if self._answer_rows_left is not None:
            self._answer_rows_left -= max(0, end - max(first, sequence.request.num_prompt))
        self._attended_pairs += num_tokens * (first + num_tokens // 2)
        if sequence.request.images is not None:
            for encoding in self._encodings(sequence, num_tokens):
                self._encoder_rows += encoding.cost
                self._encoded.add(encoding.key)
        return ends

    def _tokens_in_time(self, sequence: Sequence, limit: int, budget: StepBudget, shape: StepShape) -> int:
        floor = min(limit, max(0, budget.floor_tokens - self._prefill_rows))
        return max(floor, self._step_time.largest_prefill(shape, sequence.kv.num_computed, budget.seconds, limit))

    def _tokens_with_images(
        self, sequence: Sequence, limit: int, encodings: list[ImageEncoding], budget: StepBudget | None
    ) -> int:
        """Return how many of `limit` tokens fit with the encoding of their images, which counts as rows.

        Tokens are cut before the first image that does not fit. Since an image cannot be divided, the prefill of a step
        may begin with one whatever it costs; the tokens of this image then go with it, so that it is encoded once even
        if its features are not kept.
        """
        rows_left, shape, tokens_left = self.rows_left, self.shape, limit
        if budget is not None:
            tokens_left = self._tokens_in_time(sequence, limit, budget, shape)
        for encoding in encodings:
            if tokens_left <= encoding.num_before:
                break
            rows_left -= encoding.cost
            shape = shape._replace(prefill_rows=shape.prefill_rows + encoding.cost)
            fitting = min(limit, rows_left)
            if budget is not None and fitting > 0:
                fitting = self._step_time.largest_prefill(shape, sequence.kv.num_computed, budget.seconds, fitting)
            if fitting <= encoding.num_before:
                begins = not encoding.num_before and not self._prefill_rows
                return min(limit, encoding.num_through) if begins else encoding.num_before
            tokens_left = fitting
        return tokens_left

    def _encodings(self, sequence: Sequence, num_tokens: int) -> list[ImageEncoding]:
        """Return the images to encode for the sequence's next tokens, beyond those that the step encodes already."""
        images = sequence.request.images
        if images is None or self._encoder_work is None:
            return []
        return self._encoder_work.of_chunk(images, sequence.kv.num_computed, num_tokens, self._encoded)

    def _take_answer_rows(self, count: int) -> None:
        if self._answer_rows_left is not None:
            self._answer_rows_left -= count

    def _decodes_now(self, sequence: Sequence) -> bool:
        if sequence.num_output == 0:
            return False  # a sequence without output cannot decode
        if self._decoding is None:
            self._decoding = {chunk.sequence for chunk in self._decodes}
        return sequence in self._decoding

    def finish(self, preempted: list[Sequence], planned_ns: int) -> Plan:
        """Return the step, with the copies, replays and KV loads that are queued."""
        if self.num_drafted:  # recurrent layers take runs of single tokens first
            self._decodes.sort(key=lambda chunk: bool(chunk.draft))
        return Plan(
            chunks=self._decodes + list(self._prefills.values()),
            num_decode=len(self._decodes),
            num_rows=self.num_rows,
            preempted=preempted,
            shape=self.shape,
            planned_ns=planned_ns,
            catch_ups=self._catch_ups,
            **self._take_moves(),
        )

    def _take_moves(self) -> dict[str, Any]:
        """Return the plan's copies, replays and KV loads."""
        kv, moves = self._kv, dict[str, Any]()
        if kv.has_host:
            moves["swap_out"], moves["swap_in"] = kv.take_copies()
        if kv.has_kv_loads:
            moves["kv_loads"] = kv.take_kv_loads()
        if kv.has_states:
            moves["state_replays"] = kv.take_state_replays()
            moves["state_copies"] = kv.take_state_copies()
        return moves
