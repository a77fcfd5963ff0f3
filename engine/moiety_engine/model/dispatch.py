"""Dispatch and combine of expert parallelism with data-parallel attention: all-to-all of tokens to experts' ranks.

Every rank of a group has all of the group's tokens, so each rank dispatches a share of them. A token is sent once to
each rank that has any of its experts' slots, or a shard of one, with its whole routing in terms of slots; the result is
the sum over that rank's slots.

T tokens of the group, S this rank's share of them, D model width, K experts per token, P parts of the experts, R ranks
of the stage, N rows sent, M rows received, B bytes per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.adapter_stacks import AdaptedRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moiety_engine.distribution.collectives import RowExchange
    from moiety_engine.distribution.layout import RankPosition
    from moiety_engine.moe.expert_slots import ExpertSlots


class Dispatch:
    """Dispatch of one MoE layer. All ranks of the stage call it in the same order, including ranks without tokens."""

    def __init__(self, rank_position: RankPosition, exchange: RowExchange, slots: ExpertSlots) -> None:
        self._rank_position, self._exchange, self._slots = rank_position, exchange, slots

    def __call__(
        self,
        x_TD: Tensor,
        weight_TK: Tensor,
        expert_TK: Tensor,
        experts: Callable[[Tensor, Tensor, Tensor, AdaptedRows | None], Tensor],
        beside: Callable[[], Tensor],
        rows: AdaptedRows | None = None,
    ) -> Tensor:
        """Return the output of `beside` for all tokens, plus the chosen experts' output for this rank's share.

        `beside` is computed while rows are in flight. `experts` computes the slots of this rank. `rows`: the adapter
        slots of the tokens, which are sent too; all ranks have some or none.
        """
        share = share_of(self._rank_position, len(x_TD))
        x_SD, weight_SK, slot_SK = x_TD[share], weight_TK[share], self._slots.of(expert_TK[share], self._exchange)
        goes_RS = destinations(self._rank_position, self._slots.num_held, slot_SK)
        num_sent, num_received = self._exchange.exchange_counts(goes_RS.sum(1))
        row_N = goes_RS.nonzero()[:, 1]
        given = x_SD, weight_SK, slot_SK, *adapter_columns(rows, share)
        packed_NB = pack(*(one.index_select(0, row_N) for one in given))
        handover = self._exchange.exchange_rows(packed_NB, num_sent, num_received)
        out_TD = beside()
        received = unpack(handover.wait(), x_TD, weight_TK, has_adapters=rows is not None)
        given_MD = experts(*received) if len(received[0]) else received[0]
        given_ND = self._exchange.exchange_rows(given_MD.contiguous(), num_received, num_sent).wait()
        add_given(out_TD[share], row_N, given_ND, num_sent)
        return out_TD


def share_of(rank_position: RankPosition, num_tokens: int) -> slice:
    """Return the tokens of the group that the rank dispatches."""
    tp, rank = rank_position.layout.tp, rank_position.tp_rank
    return slice(num_tokens * rank // tp, num_tokens * (rank + 1) // tp)


def destinations(rank_position: RankPosition, num_held: int, slot_SK: Tensor) -> Tensor:
    """Return whether each token goes to each rank, bool [R, S]; a rank has `num_held` slots. Slot -1 is on no rank."""
    nowhere = rank_position.layout.ep
    goes_SP = torch.zeros(len(slot_SK), nowhere + 1, dtype=torch.bool, device=slot_SK.device)
    part_SK = torch.where(slot_SK < 0, nowhere, slot_SK // num_held)
    goes_SP.scatter_(1, part_SK.long(), value=True)
    return goes_SP[:, :nowhere].t().repeat_interleave(rank_position.expert_cuts, dim=0)


def add_given(out_SD: Tensor, row_N: Tensor, given_ND: Tensor, num_sent: list[int]) -> None:
    """Add the results of the ranks to their tokens in place; rank r returned `num_sent[r]` rows."""
    sum_SD = torch.zeros(out_SD.shape, dtype=torch.float32, device=out_SD.device)
    for row_n, given_nD in zip(torch.split(row_N, num_sent), torch.split(given_ND, num_sent), strict=True):
        sum_SD.index_add_(0, row_n, given_nD.float())  # each token at most once per call, so the order is fixed
    out_SD += sum_SD.to(out_SD.dtype)


def adapter_columns(rows: AdaptedRows | None, share: slice) -> list[Tensor]:
    """Return the adapter slots of the rank's share of the tokens, int32 [S, 1], to send; [] if no token has any."""
    return [] if rows is None else [rows.slot_T[share, None].int()]


def pack(*columns: Tensor) -> Tensor:
    """Concatenate the rows of these tensors as bytes, to send them in one message."""
    return torch.cat([one.view(torch.uint8) for one in columns], dim=1)


def unpack(
    packed_MB: Tensor, x_TD: Tensor, weight_TK: Tensor, *, has_adapters: bool
) -> tuple[Tensor, Tensor, Tensor, AdaptedRows | None]:
    """Return x, weight, slot and adapter of the received rows, with the widths and dtypes of the arguments.

    Slots are int32. `has_adapters`: the rows have adapter slots.
    """
    types = [(x_TD.shape[1], x_TD.dtype), (weight_TK.shape[1], weight_TK.dtype), (weight_TK.shape[1], torch.int32)]
    types += [(1, torch.int32)] if has_adapters else []
    widths = [width * dtype.itemsize for width, dtype in types]
    parts = torch.split(packed_MB, widths, dim=1)
    x_MD, weight_MK, slot_MK, *adapters = (
        part.contiguous().view(dtype) for part, (_, dtype) in zip(parts, types, strict=True)
    )
    return x_MD, weight_MK, slot_MK, AdaptedRows(adapters[0].squeeze(1).long()) if adapters else None
