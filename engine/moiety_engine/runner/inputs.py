"""Conversion of a plan into the arrays, and then the tensors, that the model takes.

T tokens of the step, S sequences, B blocks a row, L rows whose results are wanted, P tokens that the running step
samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import attrgetter, getitem

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from moiety_engine.images.feature_cache import FeatureCache
from moiety_engine.model.adapter_stacks import AdaptedRows
from moiety_engine.model.batch import Batch, GroupTable, ImageRows, Spread
from moiety_engine.moe.tenants import TenantSlots
from moiety_engine.runner.block_tables import BlockTables, HostTable, upload_tables
from moiety_engine.runner.image_rows import HostImages, decode_positions, image_rows
from moiety_engine.runner.state_rows import HostStates
from moiety_engine.runner.token_owners import DecodeOwners, owners_of_parts
from moiety_engine.scheduling.plan import Chunk, Plan
from moiety_engine.sequence import PENDING, Sequence
from moiety_engine.staging import Staging

# Applied to all chunks of a step without a call of Python for each.
_sequence_of, _kind_of = attrgetter("sequence"), attrgetter("num_tokens", "samples", "num_pad")
_num_computed, _tokens_of = attrgetter("kv.num_computed"), attrgetter("tokens")
_token_at: Callable[[list[int], int], int] = getitem
_ONE_TOKEN = (1, True, 0)  # kind of a decode
_NO_ROWS = np.zeros(0, dtype=np.int64)


class HostBatch(msgspec.Struct, frozen=True, eq=False):
    """Inputs of a step in host memory, with the fields of `Batch`.

    Tokens that only the device knows are 0 here: row `pending_rows_P[i]` takes the token that the running step samples
    in its row `sampled_rows_P[i]`.
    """

    token_ids_T: np.ndarray
    positions_T: np.ndarray
    slots_T: np.ndarray
    owner_T: np.ndarray
    query_start_S1: np.ndarray
    context_len_S: np.ndarray
    block_table_SB: np.ndarray
    wanted_rows_L: np.ndarray
    num_scored: int  # how many of the last wanted rows precede prompt tokens that are scored
    pending_rows_P: np.ndarray
    sampled_rows_P: np.ndarray
    num_decode: int
    max_context: int
    max_query: int
    adapter_T: np.ndarray | None = None  # adapter slots, -1 for none; None where no token of a group has an adapter
    images: HostImages | None = None
    further_tables: tuple[HostTable, ...] = ()
    states: HostStates | None = None  # None: the model has no recurrent layers

    @property
    def decodes_only(self) -> bool:
        """Return whether every row decodes one token, and its result is wanted."""
        each_wanted = len(self.token_ids_T) == self.num_decode == len(self.wanted_rows_L)
        return each_wanted and not self.num_scored and self.images is None

    @staticmethod
    def empty(*, has_adapters: bool = False) -> HostBatch:
        """Return the batch of a rank group without rows in a step. `has_adapters`: rows of other groups have some."""
        none, n = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
        zero_1, table = np.zeros(1, dtype=np.int32), np.zeros((0, 1), dtype=np.int32)
        return HostBatch(n, n, n, n, zero_1, none, table, n, 0, n, n, 0, 0, 0, n if has_adapters else None)


@dataclass(frozen=True, slots=True)
class Scored:
    """Prompt tokens whose log-probabilities are wanted, and the number of alternatives per position."""

    key: int  # key of the request
    position: int  # position of the first token
    token_ids: list[int]
    count: int


@dataclass(frozen=True, slots=True)
class _Parts:
    """The runs of consecutive tokens of a step, each of one sequence and starting at `firsts`, with their padding."""

    sequences: list[Sequence]
    firsts: list[int]
    num_tokens: list[int]
    num_pads: list[int]
    ends: list[int]  # part in which each chunk of the plan ends
    prompts: list[int]  # part with each chunk's prompt tokens; arbitrary if the chunk has none
    num_decode: int  # parts 0 … num_decode - 1 have one token each and attend as decodes
    guesses: dict[int, int]  # parts whose token is a draft token that the sequence does not contain, with that token


class BatchBuilder:
    """Builds batches from plans. Padding rows take token 0 and the positions after their sequence's.

    With `answers_apart`, every output token attends as a decode, also when it is recomputed after a preemption, and
    every prompt token attends as part of a chunk: the two attention paths round differently. Draft tokens always attend
    as decodes, so an accepted token gets the same bits as without speculation. With `tenants`, batches name the tenant
    slot of each token; with `adapters`, the slot of its adapter. `features` has the encoder's output for images.
    `num_tables`: number of cache groups. `num_record_tokens`: tokens of a draft whose inputs the slots of recurrent
    states record; None: the model has no recurrent layers.
    """

    def __init__(
        self,
        block_size: int,
        device: torch.device,
        staging: Staging | None = None,
        *,
        answers_apart: bool = False,
        tenants: TenantSlots | None = None,
        adapters: Mapping[str, int] | None = None,
        features: FeatureCache | None = None,
        num_tables: int = 1,
        num_record_tokens: int | None = None,
    ) -> None:
        self._features = features
        self._parts = _answers_apart if answers_apart else _chunks
        self._adapters = adapters
        self._block_size = block_size
        self._staging = staging or Staging(device)
        self._tenants = tenants
        self._owners = DecodeOwners(tenants)
        self._tables = BlockTables()
        self._further = [BlockTables(table) for table in range(1, num_tables)]
        self._num_record_tokens = num_record_tokens

    def build(self, plan: Plan, sampled_L: Tensor | None = None) -> Batch:
        """Return the plan's batch on the device. `sampled_L` holds the tokens that the running step samples."""
        return self.upload(self.arrange(plan), sampled_L)

    def arrange(self, plan: Plan) -> HostBatch:
        """Return the plan's batch in host memory.

        The wanted rows are, each group in the plan's order: for each chunk that samples, the rows of its newest token
        and its draft; then the rows of the chunks that embed; then the rows before the prompt tokens that are scored.
        """
        sequences = list(map(_sequence_of, plan.chunks))
        if plan.num_decode == len(sequences) > 0 and all(map(_ONE_TOKEN.__eq__, map(_kind_of, plan.chunks))):
            return self._arrange_decodes(sequences)
        self._keep_tables(sequences)  # each sequence has such a step at first
        return self._arrange(plan, self._tenants)

    def arrange_groups(self, plan: Plan, num_groups: int) -> list[HostBatch]:
        """Return one batch per rank group, with the group's own sequences.

        `owner_T` of the first batch covers the tokens of all groups.
        """
        self._keep_tables([chunk.sequence for chunk in plan.chunks])
        plans = [part_of(plan, group) for group in range(num_groups)]
        hosts = [self._arrange(part, None) if part.chunks else HostBatch.empty() for part in plans]
        if self._tenants is None:
            return hosts
        chunks = [chunk for part in plans for chunk in part.chunks]
        rows = [chunk.sequence for chunk in chunks], [chunk.num_tokens for chunk in chunks], [0] * len(chunks)
        return [replace(hosts[0], owner_T=owners_of_parts(self._tenants, *rows, plan.chunks)), *hosts[1:]]

    def _arrange_decodes(self, sequences: list[Sequence]) -> HostBatch:
        """Return the same as `_arrange` for a step of one decode per sequence, with fewer intermediate arrays.

        Most steps are of this kind.
        """
        size = self._block_size
        positions = list(map(_num_computed, sequences))
        rotary = positions if self._features is None else decode_positions(sequences, positions)
        token_ids = list(map(_token_at, map(_tokens_of, sequences), positions))
        pending = [s for s, token in enumerate(token_ids) if token == PENDING] if PENDING in token_ids else []
        for s in pending:
            token_ids[s] = 0
        sampled = [sequences[s].pending_row for s in pending]
        context_len_S = np.array(positions, dtype=np.int32)
        context_len_S += 1
        ones, rows, starts = _of_decodes(len(sequences))
        table = self._tables.of_decodes(sequences, positions, size)
        return HostBatch(
            token_ids_T=np.array(token_ids, dtype=np.int64),
            positions_T=np.array(rotary, dtype=np.int64),
            slots_T=table.slots_T,
            owner_T=self._owners.of(sequences, ones),
            query_start_S1=starts,
            context_len_S=context_len_S,
            block_table_SB=table.block_table_SB,
            wanted_rows_L=rows,
            num_scored=0,
            pending_rows_P=np.array(pending, dtype=np.int64) if pending else _NO_ROWS,
            sampled_rows_P=np.array(sampled, dtype=np.int64) if pending else _NO_ROWS,
            num_decode=len(sequences),
            max_context=max(positions) + 1,
            max_query=1,
            adapter_T=self._adapters_of(sequences, np.array(ones)) if self._adapters else None,
            further_tables=tuple([host_table.of_decodes(sequences, positions, size) for host_table in self._further])
            if self._further
            else (),
            states=None if self._num_record_tokens is None else self._states_of(sequences, positions, starts),
        )

    def _arrange(self, plan: Plan, tenants: TenantSlots | None) -> HostBatch:
        chunks, parts = plan.chunks, self._parts(plan)
        sequences, count = parts.sequences, len(parts.sequences)
        num_tokens = np.array(parts.num_tokens, dtype=np.int32)
        lengths = num_tokens + np.array(parts.num_pads, dtype=np.int32)
        firsts = np.array(parts.firsts, dtype=np.int64)
        starts = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        sequence_T = np.repeat(np.arange(count), lengths)
        positions = np.arange(starts[-1]) + (firsts - starts[:-1])[sequence_T]
        rows = sequences, sequence_T, positions, self._block_size
        table = self._tables.of_rows(*rows)
        token_ids = _tokens(parts, starts)
        pending = np.flatnonzero(token_ids == PENDING)
        token_ids[pending] = 0
        ends = (starts[:-1] + num_tokens - 1).astype(np.int64)
        wanted: list[int] = []  # parts
        for end, chunk in zip(parts.ends, chunks, strict=True):
            if chunk.samples:
                wanted += range(end - len(chunk.draft), end + 1)
        wanted += [end for end, chunk in zip(parts.ends, chunks, strict=True) if chunk.embeds]
        scored_rows = _scored_rows(chunks, parts, starts)
        contexts = (firsts + lengths).astype(np.int32)
        rotary_T, images = positions, None
        if self._features is not None:
            rotary_T, images = image_rows(parts.sequences, parts.firsts, starts, positions)
        return HostBatch(
            token_ids_T=token_ids,
            positions_T=rotary_T,
            slots_T=table.slots_T,
            owner_T=owners_of_parts(tenants, sequences, parts.num_tokens, parts.num_pads, chunks),
            query_start_S1=starts,
            context_len_S=contexts,
            block_table_SB=table.block_table_SB,
            wanted_rows_L=np.concatenate((ends[wanted], scored_rows)) if len(scored_rows) else ends[wanted],
            num_scored=len(scored_rows),
            pending_rows_P=pending,
            sampled_rows_P=np.array([sequences[s].pending_row for s in sequence_T[pending]], dtype=np.int64),
            num_decode=parts.num_decode,
            max_context=int(contexts.max()),
            max_query=int(lengths.max()),
            adapter_T=self._adapters_of(sequences, lengths),
            images=images,
            further_tables=tuple([host_table.of_rows(*rows) for host_table in self._further]),
            states=self._states_of(sequences, parts.firsts, starts),
        )

    def _states_of(self, sequences: list[Sequence], firsts: list[int], starts: np.ndarray) -> HostStates | None:
        count = self._num_record_tokens
        return None if count is None else HostStates.of(sequences, firsts, starts, count)

    def _keep_tables(self, sequences: list[Sequence]) -> None:
        for tables in (self._tables, *self._further):
            tables.keep_only(sequences)

    def upload(
        self,
        host: HostBatch,
        sampled_L: Tensor | None = None,
        spread: Spread | None = None,
        parts: SequenceOf[HostBatch] = (),
        rank_slots: SequenceOf[SequenceOf[np.ndarray]] = (),
    ) -> Batch:
        """Copy a batch to the device, and fill in the tokens that only the device knows.

        `parts` are the micro-batches, if there are any; `rank_slots` the slots of all ranks with a copy of the cache,
        for each cache group.
        """
        upload, states = self._staging.upload, host.states
        slots: tuple[Tensor, ...] = ()
        further: tuple[GroupTable, ...] = ()
        if rank_slots or host.further_tables:  # most models have one cache group, and one copy of it
            slots, further = upload_tables(upload, host.further_tables, rank_slots)
        token_ids_T = upload(host.token_ids_T)
        put_pending(token_ids_T, host, sampled_L, self._staging)
        return Batch(
            token_ids_T=token_ids_T,
            positions_T=upload(host.positions_T),
            slots_T=upload(host.slots_T),
            query_start_S1=upload(host.query_start_S1),
            context_len_S=upload(host.context_len_S),
            block_table_SB=upload(host.block_table_SB),
            wanted_rows_L=upload(host.wanted_rows_L),
            num_decode=host.num_decode,
            max_context=host.max_context,
            max_query=host.max_query,
            owner_T=None if self._tenants is None else upload(host.owner_T),
            spread=spread,
            adapted=None if host.adapter_T is None else AdaptedRows(upload(host.adapter_T)),
            images=None if host.images is None else self._upload_images(host.images),
            micro_batches=tuple(map(self.upload, parts)),
            further_tables=further,
            rank_slots=slots,
            states=None if states is None else states.upload(upload),
        )

    def _upload_images(self, images: HostImages) -> ImageRows:
        assert self._features is not None, "a step has images, but the model has no encoder"
        upload = self._staging.upload
        return ImageRows(upload(images.rows_I), upload(images.positions_3I), self._features.rows(images.parts))

    def _adapters_of(self, sequences: list[Sequence], lengths: np.ndarray) -> np.ndarray | None:
        """Return the adapter slot of each row, including padding rows; None if no row has an adapter."""
        slot_of = self._adapters
        if not slot_of:
            return None
        names = ["" if sequence.padded_row.is_finished else sequence.request.submit.adapter for sequence in sequences]
        if not any(names):
            return None
        return np.repeat(np.array([slot_of[name] if name else -1 for name in names], dtype=np.int64), lengths)


@functools.cache
def _of_decodes(count: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Return the numbers of tokens, the rows and the start offsets of `count` single-token parts.

    Do not modify the result.
    """
    return [1] * count, np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int32)


def put_pending(token_ids_T: Tensor, host: HostBatch, sampled_L: Tensor | None, staging: Staging) -> None:
    """Fill in the tokens that only the device knows."""
    if len(host.pending_rows_P):
        assert sampled_L is not None, "a token is pending but no step is running"
        tokens_P = sampled_L.index_select(0, staging.upload(host.sampled_rows_P))
        token_ids_T.index_copy_(0, staging.upload(host.pending_rows_P), tokens_P)


def part_of(plan: Plan, group: int) -> Plan:
    """Return one rank group's part of a plan."""
    chunks = [chunk for chunk in plan.chunks if chunk.sequence.kv.group == group]
    num_decode = sum(chunk.sequence.kv.group == group for chunk in plan.chunks[: plan.num_decode])
    return Plan(chunks, num_decode, sum(chunk.num_tokens for chunk in chunks), [])


def scored(plan: Plan) -> list[Scored]:
    """Return the parts of prompts whose tokens this step scores, in the order of the wanted rows."""
    return [part for chunk in plan.chunks if (part := scored_of(chunk)) is not None]


def scored_of(chunk: Chunk) -> Scored | None:
    """Return the prompt tokens of a chunk that are scored; None if there are none."""
    sequence, sampling = chunk.sequence, chunk.sequence.request.submit.sampling
    count, begin = sampling.num_prompt_logprobs, sequence.kv.num_computed
    end = min(begin + chunk.num_tokens, sequence.request.num_prompt - 1)
    first = max(begin, sampling.prompt_logprobs_from - 1)
    if count is None or first >= end:
        return None
    return Scored(sequence.key, first + 1, sequence.tokens[first + 1 : end + 1], count)


def _scored_rows(chunks: list[Chunk], parts: _Parts, starts: np.ndarray) -> np.ndarray:
    rows = []
    for chunk, part in zip(chunks, parts.prompts, strict=True):
        found = scored_of(chunk)
        if found is not None:
            first = starts[part] + found.position - 1 - parts.firsts[part]
            rows.append(np.arange(first, first + len(found.token_ids), dtype=np.int64))
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)


def _chunks(plan: Plan) -> _Parts:
    """Return one part per chunk. If there are drafts, each token of a draft is a part of its own."""
    chunks = plan.chunks
    if any(chunk.draft for chunk in chunks[: plan.num_decode]):
        return _drafts_apart(plan)
    return _Parts(
        [chunk.sequence for chunk in chunks],
        [chunk.sequence.kv.num_computed for chunk in chunks],
        [chunk.num_tokens for chunk in chunks],
        [chunk.num_pad for chunk in chunks],
        list(range(len(chunks))),
        list(range(len(chunks))),
        plan.num_decode,
        {},
    )


def _drafts_apart(plan: Plan) -> _Parts:
    """Return decodes and drafts first, one token per part, then the other chunks unchanged."""
    pieces: list[tuple[Sequence, int, int, int]] = []
    ends: list[int] = []
    guesses: dict[int, int] = {}
    for chunk in plan.chunks:
        sequence, first = chunk.sequence, chunk.sequence.kv.num_computed
        if chunk.draft:
            pieces += [(sequence, first + i, 1, 0) for i in range(chunk.num_tokens)]
            guesses.update(enumerate(chunk.draft, len(pieces) - len(chunk.draft)))
        else:
            pieces.append((sequence, first, chunk.num_tokens, chunk.num_pad))
        ends.append(len(pieces) - 1)
    sequences, firsts, num_tokens, num_pads = (list(column) for column in zip(*pieces, strict=True))
    return _Parts(sequences, firsts, num_tokens, num_pads, ends, ends, plan.num_decode + len(guesses), guesses)


def _answers_apart(plan: Plan) -> _Parts:
    """Return the output tokens first, one per part, then the prompt tokens of each chunk."""
    answers: list[tuple[Sequence, int]] = []
    prompts: list[tuple[Sequence, int, int]] = []
    ends: list[tuple[int, int]] = []
    last_prompts: list[int] = []
    guesses: dict[int, int] = {}
    for chunk in plan.chunks:
        sequence, first = chunk.sequence, chunk.sequence.kv.num_computed
        end = first + chunk.num_tokens
        begin = max(first, sequence.request.num_prompt)
        if first < begin:
            prompts.append((sequence, first, min(end, begin) - first))
        answers += [(sequence, position) for position in range(begin, end)]
        last_prompts.append(len(prompts) - 1)
        guesses.update(enumerate(chunk.draft, len(answers) - len(chunk.draft)))
        ends.append((0, len(answers) - 1) if begin < end else (len(prompts) - 1, -1))
    num_decode = len(answers)
    return _Parts(
        [sequence for sequence, _ in answers] + [sequence for sequence, _, _ in prompts],
        [position for _, position in answers] + [first for _, first, _ in prompts],
        [1] * num_decode + [count for _, _, count in prompts],
        [0] * (num_decode + len(prompts)),
        [answer if answer >= 0 else num_decode + prompt for prompt, answer in ends],
        [num_decode + prompt for prompt in last_prompts],
        num_decode,
        guesses,
    )


def _tokens(parts: _Parts, starts: np.ndarray) -> np.ndarray:
    """Return the input tokens of all rows, PENDING where only the device knows the token."""
    token_ids = np.zeros(starts[-1], dtype=np.int64)
    singles = []
    for s, (sequence, first, num_tokens) in enumerate(
        zip(parts.sequences, parts.firsts, parts.num_tokens, strict=True)
    ):
        if num_tokens == 1:
            singles.append((starts[s], parts.guesses[s] if s in parts.guesses else sequence.tokens[first]))
        else:
            token_ids[starts[s] : starts[s] + num_tokens] = sequence.tokens[first : first + num_tokens]
    if singles:
        rows, values = zip(*singles, strict=True)
        token_ids[list(rows)] = values
    return token_ids
