"""Dispatch and combine of expert parallelism with data-parallel attention: all-to-all of tokens to experts' ranks.

Every rank of a group has all of the group's tokens, so each rank dispatches a share of them. A token is sent once to
each rank that has any of its experts' slots, or a shard of one, with its whole routing in terms of slots; the result is
the sum over that rank's slots. How rows travel is left to an ExpertAllToAll.

T tokens of the group, S this rank's share of them, D model width, K experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.distribution.expert_all_to_all import ExpertRows
from moiety_engine.model.adapter_stacks import AdaptedRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moiety_engine.distribution.collectives import RowExchange
    from moiety_engine.distribution.expert_all_to_all import ExpertAllToAll, PendingCombine, PendingDispatch
    from moiety_engine.distribution.layout import RankPosition
    from moiety_engine.moe.expert_slots import ExpertSlots

    Experts = Callable[[Tensor, Tensor, Tensor, AdaptedRows | None], Tensor]


class Dispatch:
    """Dispatch of one MoE layer. All ranks of the stage call it in the same order, including ranks without tokens."""

    def __init__(
        self,
        rank_position: RankPosition,
        exchange: RowExchange,
        slots: ExpertSlots,
        all_to_all: ExpertAllToAll,
        layer: int,
    ) -> None:
        """Create the dispatch of the layer with this number, which `all_to_all` distinguishes layers by."""
        self._rank_position, self._exchange, self._slots = rank_position, exchange, slots
        self._all_to_all, self._layer = all_to_all, layer

    def __call__(
        self,
        x_TD: Tensor,
        weight_TK: Tensor,
        expert_TK: Tensor,
        experts: Experts,
        beside: Callable[[], Tensor],
        rows: AdaptedRows | None = None,
    ) -> Tensor:
        """Return the output of `beside` for all tokens, plus the chosen experts' output for this rank's share.

        `beside` is computed while rows are in flight. `experts` computes the slots of this rank. `rows`: the adapter
        slots of the tokens, which are sent too; all ranks have some or none.
        """
        begun = self.begin(x_TD, weight_TK, expert_TK, rows)
        out_TD = beside()
        begun.run_experts(experts)
        return begun.add_to(out_TD)

    def bind(self, bound: int | None) -> None:
        """Set the most tokens that any rank dispatches next; None: unknown."""
        self._all_to_all.bound = bound

    def begin(
        self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, rows: AdaptedRows | None = None
    ) -> BegunDispatch:
        """Send the rows of this rank's share. Arguments as of `__call__`."""
        share = share_of(self._rank_position, len(x_TD))
        slot_SK = self._slots.of(expert_TK[share], self._exchange)
        given = ExpertRows(x_TD[share], weight_TK[share], slot_SK, *adapter_columns(rows, share))
        return BegunDispatch(self._all_to_all.dispatch(self._layer, given, self._slots.num_held), share)


class BegunDispatch:
    """Rows of one layer on their way; `run_experts` and then `add_to` are called once each, on all ranks."""

    def __init__(self, sent: PendingDispatch, share: slice) -> None:
        self._sent, self._share = sent, share
        self._back: PendingCombine | None = None

    def run_experts(self, experts: Experts) -> None:
        """Wait for the received rows, compute them by `experts`, and send the results back without waiting."""
        received = self._sent.wait()
        adapter_S1 = received.adapter_S1
        rows = None if adapter_S1 is None else AdaptedRows(adapter_S1.squeeze(1).long())
        x_MD = received.x_SD
        given_MD = experts(x_MD, received.weight_SK, received.slot_SK, rows) if len(x_MD) else x_MD
        self._back = self._sent.combine(given_MD)

    def add_to(self, out_TD: Tensor) -> Tensor:
        """Wait for the results, add them to the rows of this rank's share in place, and return `out_TD`."""
        assert self._back is not None, "experts have not run"
        self._back.add_to(out_TD[self._share])
        return out_TD


def share_of(rank_position: RankPosition, num_tokens: int) -> slice:
    """Return the tokens of the group that the rank dispatches."""
    tp, rank = rank_position.layout.tp, rank_position.tp_rank
    return slice(num_tokens * rank // tp, num_tokens * (rank + 1) // tp)


def adapter_columns(rows: AdaptedRows | None, share: slice) -> list[Tensor]:
    """Return the adapter slots of the rank's share of the tokens, int32 [S, 1], to send; [] if no token has any."""
    return [] if rows is None else [rows.slot_T[share, None].int()]
