"""All-to-all of an MoE layer among ranks with different tokens: dispatch of rows to experts' ranks, combine of results.

`ExpertAllToAll` is the contract, and this module has its implementations on torch's collectives; `deep_ep_all_to_all`
has the one on DeepEP. They know rows and slots, and no weights.

S tokens that this rank dispatches, D model width, K slots per token, R ranks, N rows sent, M rows received, C capacity,
H header rows, B bytes per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from moiety_engine.distribution.row_capacity import RowCapacity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from moiety_engine.distribution.collectives import PendingRows, RowExchange
    from moiety_engine.distribution.layout import RankPosition

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows with their routing: x [S, D], weights [S, K] float32, slots [S, K] int32, -1 for a slot of no rank.

    `adapter_S1`: adapter slots, int32; None: no token of any rank has an adapter.
    """

    x_SD: Tensor
    weight_SK: Tensor
    slot_SK: Tensor
    adapter_S1: Tensor | None = None

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """Return the tensors of the rows."""
        one = (self.x_SD, self.weight_SK, self.slot_SK)
        return one if self.adapter_S1 is None else (*one, self.adapter_S1)

    def pack(self) -> Tensor:
        """Return the rows as bytes, [S, B], to send them in one message."""
        return torch.cat(list(map(_bytes_of, self.columns)), dim=1)

    def padding(self) -> ExpertRows:
        """Return one row like these that goes to no expert."""
        adapter_S1 = None if self.adapter_S1 is None else _one_row(self.adapter_S1, -1)
        return ExpertRows(_one_row(self.x_SD), _one_row(self.weight_SK), _one_row(self.slot_SK, -1), adapter_S1)

    def unpack(self, packed_MB: Tensor) -> ExpertRows:
        """Return packed rows of another rank, with the widths and dtypes of these rows."""
        parts = torch.split(packed_MB, [one.shape[1] * one.itemsize for one in self.columns], dim=1)
        return ExpertRows(*(part.contiguous().view(one.dtype) for part, one in zip(parts, self.columns, strict=True)))


def _one_row(x: Tensor, value: int = 0) -> Tensor:
    return x.new_full((1, x.shape[1]), value)


def _bytes_of(column_TN: Tensor) -> Tensor:
    """Return a column as bytes, uint8 [T, N · element size]."""
    column_TN = column_TN.contiguous()
    if column_TN.stride(-1) != 1:  # a tensor without rows is contiguous whatever its strides are
        column_TN = column_TN.clone(memory_format=torch.contiguous_format)
    return column_TN.view(torch.uint8)


class PendingCombine(Protocol):
    """Results of experts on their way back."""

    def add_to(self, out_SD: Tensor) -> None:
        """Wait for the results of all ranks, and add each token's sum to its row in place."""
        ...


class PendingDispatch(Protocol):
    """Rows on their way to the ranks of their experts."""

    def wait(self) -> ExpertRows:
        """Wait for the rows that this rank receives, and return them.

        Rows without any slot of this rank may be among them; their content is undefined, their slots are foreign or -1.
        """
        ...

    def combine(self, given_MD: Tensor) -> PendingCombine:
        """Return the experts' results, in the order of the received rows, to the tokens' ranks. Call it after `wait`.

        Returns at once.
        """
        ...


class ExpertAllToAll(Protocol):
    """Dispatch and combine among the R ranks of a stage that share experts and have different tokens.

    All ranks call `dispatch`, then `wait` and `combine` of its result, then `add_to`, in the same order and equally
    often, including ranks without tokens. A further `dispatch` may come between any two of these calls (two-batch
    overlap). `dispatch` and `combine` return before other ranks have sent anything, except that `dispatch` with exact
    row counts waits until every rank has called it; `wait` waits for the `dispatch` of all ranks, `add_to` for their
    `combine`. No row is dropped once `repeat_needed` has returned False.

    `bound`: the largest number of tokens that any rank dispatches next, the same on all ranks; None: unknown.
    """

    bound: int | None

    @property
    def may_repeat(self) -> bool:
        """Return whether `repeat_needed` may return True at the end of this pass."""
        ...

    def begin_pass(self, *, repeatable: bool, repeats: bool) -> None:
        """Begin a pass through all layers. `repeatable`: the pass may be run again. `repeats`: it is run again.

        Both must be equal on all ranks, since capacities follow from them.
        """
        ...

    def dispatch(self, layer: int, rows: ExpertRows, num_held: int) -> PendingDispatch:
        """Send each row once to each rank that has any of its slots, or a shard of one.

        `layer`: number of the layer in the pass. `num_held`: the layer's slots on each rank; slot s is in part
        s // num_held.
        """
        ...

    def repeat_needed(self) -> bool:
        """Return, at the end of a pass, whether it must be run again: a rank had more rows than were sent.

        All ranks return the same.
        """
        ...


class ExactAllToAll:
    """Implementation with exact row counts: ranks first exchange how many rows follow.

    Each dispatch waits for the counts of all ranks on the host. Suits gloo, where the host carries the rows anyway.
    """

    def __init__(self, exchange: RowExchange, rank_position: RankPosition) -> None:
        self._exchange, self._rank_position = exchange, rank_position
        self.bound: int | None = None
        self.may_repeat = False

    def begin_pass(self, *, repeatable: bool, repeats: bool) -> None:
        """Do nothing: no pass is repeated."""

    def dispatch(self, layer: int, rows: ExpertRows, num_held: int) -> PendingDispatch:
        """Send each row to its ranks; see ExpertAllToAll."""
        goes_RS = destinations(self._rank_position, num_held, rows.slot_SK)
        num_sent, num_received = self._exchange.exchange_counts(goes_RS.sum(1))
        row_N = goes_RS.nonzero()[:, 1]
        coming = self._exchange.exchange_rows(rows.pack().index_select(0, row_N), num_sent, num_received)
        return _ExactDispatch(self._exchange, rows, row_N, num_sent, num_received, coming)

    def repeat_needed(self) -> bool:
        """Return False."""
        return False


@dataclass(frozen=True, slots=True)
class _ExactDispatch:
    _exchange: RowExchange
    _like: ExpertRows
    _row_N: Tensor
    _num_sent: list[int]
    _num_received: list[int]
    _coming: PendingRows

    def wait(self) -> ExpertRows:
        return self._like.unpack(self._coming.wait())

    def combine(self, given_MD: Tensor) -> PendingCombine:
        back = self._exchange.exchange_rows(given_MD.contiguous(), self._num_received, self._num_sent)
        return _RowsCombine(back, self._row_N, self._num_sent)


@dataclass(frozen=True, slots=True)
class _RowsCombine:
    """Results in the order of the ranks; the row of each is in `_row_N`, S for padding."""

    _coming: PendingRows
    _row_N: Tensor
    _num_rows: Sequence[int]

    def add_to(self, out_SD: Tensor) -> None:
        add_given(out_SD, self._row_N, self._coming.wait(), self._num_rows)


def destinations(rank_position: RankPosition, num_held: int, slot_SK: Tensor) -> Tensor:
    """Return whether each token goes to each rank, bool [R, S]; a rank has `num_held` slots. Slot -1 is on no rank."""
    nowhere = rank_position.layout.ep
    goes_SP = torch.zeros(len(slot_SK), nowhere + 1, dtype=torch.bool, device=slot_SK.device)
    part_SK = torch.where(slot_SK < 0, nowhere, slot_SK // num_held)
    goes_SP.scatter_(1, part_SK.long(), value=True)
    return goes_SP[:, :nowhere].t().repeat_interleave(rank_position.expert_cuts, dim=0)


def add_given(out_SD: Tensor, row_N: Tensor, given_ND: Tensor, num_sent: Sequence[int]) -> None:
    """Add the results of the ranks to their tokens in place; rank r returned `num_sent[r]` rows.

    The sums are computed in float32 in the order of the ranks. `row_N`: the token of each row, S for padding.
    """
    sum_SD = torch.zeros((len(out_SD) + 1, out_SD.shape[1]), dtype=torch.float32, device=out_SD.device)
    counts = list(num_sent)
    for row_n, given_nD in zip(torch.split(row_N, counts), torch.split(given_ND, counts), strict=True):
        sum_SD.index_add_(0, row_n, given_nD.float())  # each token at most once per call, so the order is fixed
    out_SD += sum_SD[:-1].to(out_SD.dtype)


class PaddedAllToAll:
    """Implementation with a capacity for each destination, which all ranks know: no host waits in a layer.

    A capacity follows from the rows that layer sent to that destination in the last passes (`RowCapacity`). Each block
    has a header with the sender's row counts. If a rank had more rows than a capacity, the pass is run again with room
    for all tokens, which the host learns once a pass.
    """

    def __init__(self, exchange: RowExchange, rank_position: RankPosition) -> None:
        self._exchange, self._rank_position = exchange, rank_position
        self.bound: int | None = None
        self._exact = ExactAllToAll(exchange, rank_position)
        self._capacities: dict[int, RowCapacity] = {}  # by layer
        self._has_room_for_all = True
        self._sent: list[_PaddedDispatch] = []
        self.repeats_total = 0

    @property
    def may_repeat(self) -> bool:
        """Return whether capacities are smaller than the number of tokens in this pass."""
        return not self._has_room_for_all

    def begin_pass(self, *, repeatable: bool, repeats: bool) -> None:
        """Begin a pass; without `repeatable`, and when it repeats, capacities have room for all tokens."""
        self._sent.clear()
        self._has_room_for_all = repeats or not repeatable
        self.repeats_total += repeats

    def dispatch(self, layer: int, rows: ExpertRows, num_held: int) -> PendingDispatch:
        """Send each row to its ranks; see ExpertAllToAll. Without a bound, with exact row counts."""
        if self.bound is None:
            return self._exact.dispatch(layer, rows, num_held)
        exchange, device = self._exchange, rows.x_SD.device
        assert len(rows.x_SD) <= self.bound, "more tokens than the bound"
        known = self._capacities.setdefault(layer, RowCapacity(exchange.size))
        capacity_R = [self.bound] * exchange.size if self._has_room_for_all else known.of_step(self.bound)
        goes_RS = destinations(self._rank_position, num_held, rows.slot_SK)
        row_N = _rows_in_order(goes_RS, capacity_R)
        packed_SB = torch.cat((rows.pack(), rows.padding().pack()))
        counts_R = goes_RS.sum(1).int()
        width = packed_SB.shape[1]
        num_header_rows = -(-4 * exchange.size // width)
        header_HB = torch.zeros(num_header_rows * width, dtype=torch.uint8, device=device)
        header_HB[: 4 * exchange.size] = counts_R.view(torch.uint8)
        parts = []
        for row_n in torch.split(row_N, capacity_R):
            parts += [header_HB.view(-1, width), packed_SB.index_select(0, row_n)]
        num_sent = [num_header_rows + capacity for capacity in capacity_R]
        num_received = [num_sent[exchange.rank]] * exchange.size
        coming = exchange.exchange_rows(torch.cat(parts), num_sent, num_received)
        sent = _PaddedDispatch(exchange, layer, rows, row_N, capacity_R, self.bound, num_header_rows, coming)
        self._sent.append(sent)
        return sent

    def repeat_needed(self) -> bool:
        """Return whether the pass must be run again, and remember its row counts. Waits for the device once."""
        if not self._sent:
            return False
        needed = torch.stack([one.needed_R for one in self._sent]).tolist()  # the only wait for the device in a pass
        overflows = False
        for one, needed_R in zip(self._sent, needed, strict=True):
            self._capacities[one.layer].observe(needed_R, one.bound)
            overflows |= any(rows > room for rows, room in zip(needed_R, one.capacity_R, strict=True))
        self._sent.clear()
        return overflows


def _rows_in_order(goes_RS: Tensor, capacity_R: Sequence[int]) -> Tensor:
    """Return the token in each place of all blocks, int64 [sum of C]; S in places without a token."""
    num_tokens = goes_RS.shape[1]
    if not num_tokens:
        return torch.zeros(sum(capacity_R), dtype=torch.int64, device=goes_RS.device)
    token_S = torch.arange(num_tokens, device=goes_RS.device)
    blocks = []
    for goes_S, capacity in zip(goes_RS, capacity_R, strict=True):
        place_S = torch.where(goes_S, goes_S.cumsum(0) - 1, capacity).clamp_(max=capacity)  # the last is discarded
        block_C = torch.full((capacity + 1,), num_tokens, dtype=torch.int64, device=goes_RS.device)
        blocks.append(block_C.scatter_(0, place_S, token_S)[:capacity])
    return torch.cat(blocks)


class _PaddedDispatch:
    """Rows in transfer with padding. `needed_R`, int32, is known after `wait`: the most rows that any rank had."""

    def __init__(
        self,
        exchange: RowExchange,
        layer: int,
        like: ExpertRows,
        row_N: Tensor,
        capacity_R: list[int],
        bound: int,
        num_header_rows: int,
        coming: PendingRows,
    ) -> None:
        self._exchange, self._like, self._row_N, self._coming = exchange, like, row_N, coming
        self.layer, self.capacity_R, self.bound = layer, capacity_R, bound
        self._num_header_rows = num_header_rows
        self.needed_R: Tensor

    def wait(self) -> ExpertRows:
        size, num_header_rows = self._exchange.size, self._num_header_rows
        blocks = self._coming.wait()
        blocks = blocks.view(size, -1, blocks.shape[1])  # [R, H + C, B]
        headers = blocks[:, :num_header_rows].flatten(1)[:, : 4 * size].contiguous()
        self.needed_R = headers.view(torch.int32).amax(0)
        return self._like.unpack(blocks[:, num_header_rows:].flatten(0, 1))

    def combine(self, given_MD: Tensor) -> PendingCombine:
        num_given = [self.capacity_R[self._exchange.rank]] * self._exchange.size
        back = self._exchange.exchange_rows(given_MD.contiguous(), num_given, self.capacity_R)
        return _RowsCombine(back, self._row_N, self.capacity_R)


def run_complete_pass(
    all_to_all: ExpertAllToAll | None, run: Callable[[Tensor], Result], x_TD: Tensor, *, repeatable: bool
) -> Result:
    """Return the result of a pass through all layers in which no row was dropped; runs it twice where needed.

    `run` may overwrite its argument. `all_to_all`: None where ranks do not exchange rows. `repeatable`: the pass may be
    run again; it must be equal on all ranks.
    """
    if all_to_all is None:
        return run(x_TD)
    all_to_all.begin_pass(repeatable=repeatable, repeats=False)
    kept_TD = x_TD.clone() if all_to_all.may_repeat else x_TD
    result = run(x_TD)
    if all_to_all.repeat_needed():
        all_to_all.begin_pass(repeatable=repeatable, repeats=True)
        result = run(kept_TD)
        assert not all_to_all.repeat_needed(), "a repeated pass has room for all rows"
    return result
