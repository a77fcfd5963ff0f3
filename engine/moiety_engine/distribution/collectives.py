"""The ways of a rank to the others that share a computation with it. A group of one computes nothing and waits for
nobody, so whoever uses a group need not ask how large it is.

L rows, C columns of each rank; N rows that a rank hands out, M that it is handed, B bytes or values a row, R ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist

from moiety_engine.distribution.layout import ONLY_SEAT, Seat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Came_co = TypeVar("Came_co", covariant=True)


class PendingReceive(Protocol[Came_co]):
    """What others have yet to send."""

    def wait(self) -> Came_co: ...


class RankCollectives:
    """Some ranks in order. All of them must call the same methods in the same order."""

    def __init__(self, handle: dist.ProcessGroup | None = None) -> None:
        self._handle = handle
        self.size = 1 if handle is None else handle.size()
        self.rank = 0 if handle is None else handle.rank()

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, on each of them, bit by bit the same; x may be overwritten."""
        if self._handle is not None and x.numel():
            x = x.contiguous()
            dist.all_reduce(x, group=self._handle)
        return x

    def gather_columns(self, x_LC: Tensor) -> Tensor:
        """All ranks' columns side by side, [L, size · C], on the first rank; on the others x itself."""
        if self._handle is None:
            return x_LC
        x_LC = x_LC.contiguous()
        parts = [torch.empty_like(x_LC) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x_LC, parts, group=self._handle, group_dst=0)
        return x_LC if parts is None else torch.cat(parts, dim=1)

    def copy_first(self, x: Tensor) -> Tensor:
        """What the first rank has, on each of them; the others' x, of the same shape, is overwritten."""
        if self._handle is not None:
            dist.broadcast(x, group=self._handle, group_src=0)
        return x


class Pipeline:
    """The ranks that have one stage of layers each, one after the other; the first one has the vocabulary too. A
    pipeline of one passes nothing on."""

    def __init__(self, ranks: Sequence[int] = (0,), stage: int = 0) -> None:
        """`ranks`: all of it, in order; this is the one at `stage`."""
        self._ranks, self._stage = ranks, stage
        self.size = len(ranks)
        self.is_first = stage == 0
        self._is_last = stage == len(ranks) - 1

    def receive(self, x: Tensor) -> Tensor:
        """What the stage before gives, in x, which has its shape."""
        if x.numel():
            dist.recv(x, self._ranks[self._stage - 1])
        return x

    def pass_on(self, x: Tensor) -> None:
        """To the stage after, if there is one."""
        if not self._is_last and x.numel():
            dist.send(x.contiguous(), self._ranks[self._stage + 1])

    def bring_columns_home(self, x_TC: Tensor, num_columns: Sequence[int]) -> Tensor:
        """All stages' columns side by side, on the first; on the others x itself. `num_columns`: of each stage."""
        if not self.is_first:
            if x_TC.numel():
                dist.send(x_TC.contiguous(), self._ranks[0])
            return x_TC
        parts = [x_TC]
        for rank, count in zip(self._ranks[1:], num_columns[1:], strict=True):
            part = x_TC.new_empty(len(x_TC), count)
            if part.numel():
                dist.recv(part, rank)
            parts.append(part)
        return torch.cat(parts, dim=1)

    def bring_home(self, x: Tensor) -> Tensor:
        """What the last stage has, on the first; x has its shape everywhere."""
        if len(self._ranks) > 1 and x.numel():
            if self._is_last:
                dist.send(x.contiguous(), self._ranks[0])
            elif self.is_first:
                dist.recv(x, self._ranks[-1])
        return x


class DataParallelGroup:
    """The ranks that do the same part of attention, each for sequences of its own; of one such rank there is nothing
    to bring."""

    def __init__(self, ranks: Sequence[int] = (0,), rank: int = 0) -> None:
        """`ranks`: all of them, in order; this is the one at `rank`."""
        self._ranks, self.rank = ranks, rank
        self.size = len(ranks)

    def bring_first(self, x_LC: Tensor, num_rows: Sequence[int]) -> Tensor:
        """All ranks' rows, one's after the other's, on the first one; on the others x itself. `num_rows`: of each."""
        if self.rank:
            if x_LC.numel():
                dist.send(x_LC.contiguous(), self._ranks[0])
            return x_LC
        parts = [x_LC]
        for rank, count in zip(self._ranks[1:], num_rows[1:], strict=True):
            parts.append(x_LC.new_empty(count, x_LC.shape[1]))
            if parts[-1].numel():
                dist.recv(parts[-1], rank)
        return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Rows on their way."""

    _rows_NB: Tensor  # held until all have gone
    _rows_MB: Tensor
    _work: dist.Work

    def wait(self) -> Tensor:
        """What this rank was handed, [M, B], by the ranks in order."""
        self._work.wait()
        return self._rows_MB


class RowExchange:
    """The ranks of a stage, each of which hands rows to each, as many as it likes, none included."""

    def __init__(self, handle: dist.ProcessGroup) -> None:
        self._handle = handle
        self.size, self.rank = handle.size(), handle.rank()

    def tell_counts(self, num_sent_R: Tensor) -> tuple[list[int], list[int]]:
        """How many rows go to each rank, int64, and how many come from each."""
        num_received_R = torch.empty_like(num_sent_R)
        dist.all_to_all_single(num_received_R, num_sent_R, group=self._handle)
        return num_sent_R.tolist(), num_received_R.tolist()

    def tell_all(self, x_E: Tensor) -> Tensor:
        """What each rank tells, [R, E], on all of them."""
        all_RE = [torch.empty_like(x_E) for _ in range(self.size)]
        dist.all_gather(all_RE, x_E, group=self._handle)
        return torch.stack(all_RE)

    def hand_out(self, rows_NB: Tensor, num_sent: list[int], num_received: list[int]) -> PendingRows:
        """Rows in the order of the ranks that they go to. Returns at once."""
        rows_MB = rows_NB.new_empty(sum(num_received), rows_NB.shape[1])
        work = dist.all_to_all_single(rows_MB, rows_NB, num_received, num_sent, group=self._handle, async_op=True)
        assert work is not None, "this rank is none of the group"
        return PendingRows(rows_NB, rows_MB, work)

    def announce(self, num_sent: list[int]) -> PendingRowCounts:
        """How many rows this rank will hand to each. Returns at once; all ranks announce before each handing out."""
        num_sent_R = torch.tensor(num_sent)  # on the processors' network: hosts want to know, not devices
        num_received_R = torch.empty_like(num_sent_R)
        work = dist.all_to_all_single(num_received_R, num_sent_R, group=self._handle, async_op=True)
        assert work is not None, "this rank is none of the group"
        return PendingRowCounts(num_sent_R, num_received_R, work)


@dataclass(frozen=True, slots=True)
class PendingRowCounts:
    """Numbers of rows on their way."""

    _num_sent_R: Tensor  # held until all have gone
    _num_received_R: Tensor
    _work: dist.Work

    def wait(self) -> list[int]:
        """How many rows come from each rank."""
        self._work.wait()
        return self._num_received_R.tolist()


class Waited:
    """How long a rank has waited for others' work: on a GPU only what its host has."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on(self, coming: PendingReceive[Came_co]) -> Came_co:
        """What is waited for."""
        begin_s = time.perf_counter()
        try:
            return coming.wait()
        finally:
            self.seconds += time.perf_counter() - begin_s


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """Between the ranks of a stage, which come first, and those with the experts. Each way has its own exchange: what
    comes back does not wait behind what goes."""

    there: RowExchange
    back: RowExchange
    num_attention: int


def hand_over(sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
    """Tensors to other ranks, and theirs into tensors of the same size, each with the rank that is meant. Between two
    ranks both have them in the same order. Returns when all have come."""
    ways = [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in sends]
    ways += [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in receives]
    for work in dist.batch_isend_irecv(ways) if ways else ():
        work.wait()


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where a rank sits, and whom it computes with."""

    seat: Seat = ONLY_SEAT
    tensor: RankCollectives = field(
        default_factory=RankCollectives
    )  # those that share attention and dense feed-forwards
    pipeline: Pipeline = field(default_factory=Pipeline)
    everyone: RankCollectives = field(default_factory=RankCollectives)
    across: DataParallelGroup = field(default_factory=DataParallelGroup)  # those with other sequences
    experts: RowExchange | None = None  # those that share experts, where they do not all have all tokens
    crossings: tuple[
        ExpertExchange, ...
    ] = ()  # where experts have ranks of their own: its stage's; on these, all stages'
    waited: Waited = field(default_factory=Waited)  # for those at the other end of them


ALONE = Ranks()
