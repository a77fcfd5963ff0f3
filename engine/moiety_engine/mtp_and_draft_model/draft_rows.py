"""Inputs of a draft model's passes, as the arrays of a batch.

An MTP layer reads the served model's hidden state of each position together with the token `lag` positions later. Of
several MTP layers, each has a pass over the same positions, and reads one token further ahead.

T tokens of the pass, S sequences of it, B blocks a row, D sequences that get a draft.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from moiety_engine.moe.tenants import NO_TENANT
from moiety_engine.runner.block_tables import BlockTables
from moiety_engine.runner.inputs import HostBatch
from moiety_engine.sequence import PENDING, Sequence

_MAX_SPLIT_TOKENS = 4  # chunks of up to so many tokens are split into decodes, so that most passes contain only decodes


class DraftChunk(NamedTuple):
    """Positions `first` to `end` - 1 of a sequence to prefill; `drafts`: number of tokens to propose after them."""

    sequence: Sequence
    first: int
    end: int
    drafts: int = 0


class _DraftPart(NamedTuple):
    """Part of a chunk that the model reads as one sequence of the pass."""

    piece: DraftChunk
    first: int
    num_tokens: int


class _FirstPass(NamedTuple):
    """First pass of a group, whose positions those of further MTP layers share."""

    host: HostBatch
    parts: list[_DraftPart]
    sequence_T: np.ndarray  # part of each token


class DraftRows:
    """Passes of one step's drafts, with one batch for each rank group.

    Rows of drafts are those of the first group, then those of the next.
    """

    def __init__(
        self,
        pieces: Iterable[DraftChunk],
        block_size: int,
        tables: BlockTables,
        lag: int = 0,
        num_groups: int = 1,
        num_layers: int = 1,
    ) -> None:
        self.pieces, self._num_layers = list(pieces), num_layers
        tables.keep_only([piece.sequence for piece in self.pieces])
        of_groups: list[list[DraftChunk]] = [[] for _ in range(num_groups)]
        for piece in self.pieces:
            of_groups[piece.sequence.kv.group].append(piece)
        self._groups = [_GroupRows(own, block_size, tables, lag, num_layers) for own in of_groups]
        self.drafting = [piece for group in self._groups for piece in group.drafting]

    def wanting(self, number: int) -> list[int]:
        """Return the indices in `drafting` of the sequences that pass `number` drafts a token for.

        A pass of each MTP layer drafts one for all sequences, since the next layer needs it.
        """
        is_layer = number < self._num_layers
        return [row for row, piece in enumerate(self.drafting) if is_layer or piece.drafts > number]

    def first_pass(self) -> list[HostBatch]:
        """Return the inputs of pass 0, which prefills the tokens that the model lacks.

        The wanted rows are the last ones of the sequences that get a draft.
        """
        return [group.first_pass() if group.pieces else HostBatch.empty() for group in self._groups]

    def next_pass(self, number: int) -> list[HostBatch]:
        """Return the inputs of pass `number`, 1 or later.

        A pass of a further MTP layer has the rows of the first pass. A later one reads the token of the pass before in
        each row, and contains the rows whose drafts continue; empty if none does.
        """
        if number < self._num_layers:
            return self._layer_pass(number)
        if not any(group.count(number) for group in self._groups):
            return []
        hosts, first = list[HostBatch](), 0
        for group in self._groups:
            hosts.append(group.next_pass(number, first) if group.count(number) else HostBatch.empty())
            first += group.count(number - 1)
        return hosts

    def _layer_pass(self, number: int) -> list[HostBatch]:
        hosts, first = list[HostBatch](), 0
        for group in self._groups:
            rows = range(first, first + len(group.drafting))
            empty = HostBatch.empty()
            hosts.append(group.layer_pass(number, rows, len(self.drafting)) if group.pieces else empty)
            first = rows.stop
        return hosts


class _GroupRows:
    """Rows of one rank group.

    Sequences are sorted by draft length in descending order, so that each pass uses a prefix of the rows of the pass
    before.
    """

    def __init__(
        self, pieces: list[DraftChunk], block_size: int, tables: BlockTables, lag: int, num_layers: int
    ) -> None:
        self.pieces = sorted(pieces, key=lambda piece: -piece.drafts)
        self._block_size, self._tables, self._lag, self._num_layers = block_size, tables, lag, num_layers
        self._rows: _FirstPass | None = None
        self.drafting = [piece for piece in self.pieces if piece.drafts]
        width = max((len(piece.sequence.kv.blocks) for piece in self.drafting), default=1)
        self._table_DB = np.zeros((len(self.drafting), width), dtype=np.int32)
        for row, piece in enumerate(self.drafting):
            self._table_DB[row, : len(piece.sequence.kv.blocks)] = tables.of(piece.sequence)
        self._ends_D = np.array([piece.end for piece in self.drafting], dtype=np.int64)
        self._drafts_D = np.array([piece.drafts for piece in self.drafting], dtype=np.int64)

    def count(self, number: int) -> int:
        """Return the number of rows of pass `number` that draft a token."""
        return len(self.drafting) if number < self._num_layers else int((self._drafts_D > number).sum())

    def first_pass(self) -> HostBatch:
        parts = sorted(self._parts(), key=lambda part: part.num_tokens > 1)
        counts = np.array([part.num_tokens for part in parts], dtype=np.int32)
        firsts = np.array([part.first for part in parts], dtype=np.int64)
        starts = np.zeros(len(parts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        table_SB = np.zeros((len(parts), max(len(part.piece.sequence.kv.blocks) for part in parts)), dtype=np.int32)
        for row, (piece, _, _) in enumerate(parts):
            table_SB[row, : len(piece.sequence.kv.blocks)] = self._tables.of(piece.sequence)
        sequence_T = np.repeat(np.arange(len(parts)), counts)
        positions_T = np.arange(starts[-1]) + (firsts - starts[:-1])[sequence_T]
        lag = self._lag
        tokens = [token for p, first, count in parts for token in p.sequence.tokens[first + lag : first + lag + count]]
        token_ids_T = np.array(tokens, dtype=np.int64)
        pending_P = np.flatnonzero(token_ids_T == PENDING)
        token_ids_T[pending_P] = 0
        last_row = {id(p): end - 1 for (p, first, n), end in zip(parts, starts[1:], strict=True) if first + n == p.end}
        host = self._batch(
            token_ids_T,
            positions_T,
            table_SB,
            sequence_T,
            starts,
            contexts_S=(firsts + counts).astype(np.int32),
            wanted_L=np.array([last_row[id(piece)] for piece in self.drafting], dtype=np.int64),
            pending_P=pending_P,
            sampled_P=np.array([parts[s].piece.sequence.pending_row for s in sequence_T[pending_P]], dtype=np.int64),
            num_decode=int((counts == 1).sum()),
        )
        self._rows = _FirstPass(host, parts, sequence_T) if self._num_layers > 1 else None
        return host

    def layer_pass(self, number: int, drafting: range, num_drafting: int) -> HostBatch:
        """Return the inputs of MTP layer `number`, which reads tokens `number` positions after those of the first one.

        Tokens after the newest one are those of the passes before, which come before the running step's; `drafting` are
        the rows of this group among the `num_drafting` ones of each pass.
        """
        assert self._rows is not None, "the passes of further layers follow the first one"
        host, parts, sequence_T = self._rows
        row_of = {id(piece): row for piece, row in zip(self.drafting, drafting, strict=True)}
        token_ids_T, pending, sampled = np.zeros(len(host.token_ids_T), dtype=np.int64), list[int](), list[int]()
        for row, (part, position) in enumerate(zip(sequence_T.tolist(), host.positions_T.tolist(), strict=True)):
            piece = parts[part].piece
            tokens, index = piece.sequence.tokens, position + self._lag + number
            if index < len(tokens) and tokens[index] != PENDING:
                token_ids_T[row] = tokens[index]
                continue
            pending.append(row)
            if index < len(tokens):
                sampled.append(number * num_drafting + piece.sequence.pending_row)
            else:
                sampled.append((index - len(tokens)) * num_drafting + row_of[id(piece)])
        return replace(
            host,
            token_ids_T=token_ids_T,
            pending_rows_P=np.array(pending, dtype=np.int64),
            sampled_rows_P=np.array(sampled, dtype=np.int64),
        )

    def next_pass(self, number: int, first: int) -> HostBatch:
        """Return the inputs of pass `number`. `first`: index of the group's first token in the pass before."""
        count = self.count(number)
        rows = np.arange(count)
        positions_T = self._ends_D[:count] + number - self._num_layers
        return self._batch(
            np.zeros(count, dtype=np.int64),
            positions_T,
            self._table_DB[:count],
            rows,
            np.arange(count + 1, dtype=np.int32),
            contexts_S=(positions_T + 1).astype(np.int32),
            wanted_L=rows,
            pending_P=rows,
            sampled_P=rows + first,
            num_decode=count,
        )

    def _parts(self) -> Iterable[_DraftPart]:
        for piece in self.pieces:
            count = piece.end - piece.first
            if count > _MAX_SPLIT_TOKENS:
                yield _DraftPart(piece, piece.first, count)
            else:
                for position in range(piece.first, piece.end):
                    yield _DraftPart(piece, position, 1)

    def _batch(
        self,
        token_ids_T: np.ndarray,
        positions_T: np.ndarray,
        table_SB: np.ndarray,
        sequence_T: np.ndarray,
        starts_S1: np.ndarray,
        *,
        contexts_S: np.ndarray,
        wanted_L: np.ndarray,
        pending_P: np.ndarray,
        sampled_P: np.ndarray,
        num_decode: int,
    ) -> HostBatch:
        in_block, offset = np.divmod(positions_T, self._block_size)
        return HostBatch(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            slots_T=table_SB[sequence_T, in_block].astype(np.int64) * self._block_size + offset,
            owner_T=np.full(len(token_ids_T), NO_TENANT, dtype=np.int64),
            query_start_S1=starts_S1,
            context_len_S=contexts_S,
            block_table_SB=table_SB,
            wanted_rows_L=wanted_L,
            num_scored=0,
            pending_rows_P=pending_P,
            sampled_rows_P=sampled_P,
            num_decode=num_decode,
            max_context=int(contexts_S.max()),
            max_query=int(np.diff(starts_S1).max()),
        )
