"""Collective operations among the ranks that share a computation.

A group of one rank neither computes nor waits, so the caller need not check the group's size.

L rows, C columns of each rank; N rows that a rank sends, M rows that it receives, B bytes or values a row, R ranks; T
tokens, H heads of a rank, d values of a head.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist

from moiety_engine.distribution.layout import SINGLE_RANK, RankPosition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Received_co = TypeVar("Received_co", covariant=True)


class PendingReceive(Protocol[Received_co]):
    """Data that other ranks have yet to send."""

    def wait(self) -> Received_co: ...


class RankCollectives:
    """Ordered group of ranks. All of its ranks must call the same methods in the same order.

    With `has_ordered_sums` a sum adds the ranks' values in the order of the ranks, so the bits of a value do not depend
    on the tensor around it, as they do in an all-reduce; each rank then receives the values of all others.
    """

    def __init__(self, handle: dist.ProcessGroup | None = None, *, has_ordered_sums: bool = False) -> None:
        self._handle, self._has_ordered_sums = handle, has_ordered_sums
        self.size = 1 if handle is None else handle.size()
        self.rank = 0 if handle is None else handle.rank()

    def replace_group(self, handle: dist.ProcessGroup) -> None:
        """Use another group from now on. All of its ranks must call this at the same point."""
        self._handle, self.size, self.rank = handle, handle.size(), handle.rank()

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, bitwise the same on each of them; x may be overwritten."""
        if self._handle is None or not x.numel():
            return x
        x = x.contiguous()
        if not self._has_ordered_sums:
            dist.all_reduce(x, group=self._handle)
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self._handle)
        for part in parts[1:]:
            parts[0] += part
        return parts[0]

    def gather_columns(self, x_LC: Tensor) -> Tensor:
        """Return all ranks' columns side by side, [L, size · C], on the first rank; x itself on the others."""
        if self._handle is None:
            return x_LC
        x_LC = x_LC.contiguous()
        parts = [torch.empty_like(x_LC) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x_LC, parts, group=self._handle, group_dst=0)
        return x_LC if parts is None else torch.cat(parts, dim=1)

    def gather_heads(self, x_THd: Tensor) -> Tensor:
        """Return the heads of all ranks, in the order of the ranks, [T, R · H, d], on each of them."""
        if self._handle is None:
            return x_THd
        x_THd = x_THd.contiguous()
        parts = [torch.empty_like(x_THd) for _ in range(self.size)]
        dist.all_gather(parts, x_THd, group=self._handle)
        return torch.cat(parts, dim=1)

    def all_gather_rows(self, x_LC: Tensor, num_rows: Sequence[int]) -> list[Tensor]:
        """Return the rows of each rank, of which there are `num_rows`, on all ranks."""
        if self._handle is None:
            return [x_LC]
        padded = x_LC.new_zeros(max(num_rows), x_LC.shape[1])
        padded[: len(x_LC)] = x_LC
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._handle)
        return [part[:count] for part, count in zip(parts, num_rows, strict=True)]

    def exchange_parts(self, x_RE: Tensor) -> Tensor:
        """Send rank r the part x[r], contiguous; return what the ranks, in order, have sent to this one, [R, …]."""
        if self._handle is None:
            return x_RE
        received_RE = torch.empty_like(x_RE)
        dist.all_to_all_single(received_RE, x_RE, group=self._handle)
        return received_RE

    def broadcast_first(self, x: Tensor) -> Tensor:
        """Broadcast the first rank's tensor; on the other ranks x, of the same shape, is overwritten."""
        if self._handle is not None:
            dist.broadcast(x, group=self._handle, group_src=0)
        return x


@dataclass(frozen=True, slots=True)
class Present:
    """Data that need not be waited for."""

    _x: Tensor

    def wait(self) -> Tensor:
        """Return the tensor."""
        return self._x


@dataclass(frozen=True, slots=True)
class PendingTensors:
    """Tensors of the same number of rows in transfer, one of each sender."""

    _parts: list[Tensor]
    _works: list[dist.Work]

    def wait(self) -> Tensor:
        """Return the tensors side by side, once all have arrived."""
        for work in self._works:
            work.wait()
        return self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts, dim=1)


class Pipeline:
    """The ranks of a pipeline, one per stage of layers. The first rank also has the vocabulary.

    Sending never waits for the receiver, so a stage continues with its next step. A pipeline of one rank sends nothing.
    Tensors are kept until they are sent.
    """

    def __init__(
        self,
        ranks: Sequence[int] = (0,),
        stage: int = 0,
        returning: dist.ProcessGroup | None = None,
        *,
        most_pending: int = 1,
    ) -> None:
        """Create the view of the rank at `stage`. `ranks` are all ranks of the pipeline, in order.

        `returning` is the group of these ranks by which results go to the first stage, so that they do not queue behind
        the rows of later steps. `most_pending` is the number of steps that may be in the pipeline at once.
        """
        self._ranks, self._stage, self._returning = ranks, stage, returning
        self.size = len(ranks)
        self.is_first = stage == 0
        self._is_last = stage == len(ranks) - 1
        self._most_pending = 3 * most_pending  # rows, results and chosen experts of each step
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    @property
    def num_unsent(self) -> int:
        """Tensors that are kept because they may not be sent yet."""
        return len(self._sent)

    def receive(self, x: Tensor) -> Tensor:
        """Receive the previous stage's output into x, which has its shape."""
        if x.numel():
            dist.recv(x, self._ranks[self._stage - 1])
        return x

    def send_to_next_stage(self, x: Tensor) -> None:
        """Send x, which must not change any more, to the next stage, if there is one. Return at once."""
        if not self._is_last and x.numel():
            self._send(x, self._ranks[self._stage + 1], None)

    def begin_gather_columns(self, x_TC: Tensor, num_columns: Sequence[int]) -> PendingReceive[Tensor]:
        """Begin to gather all stages' columns side by side on the first stage; the others get x itself.

        `num_columns` are the numbers of columns of the stages. All stages must call this and `begin_return` in the
        same order.
        """
        if not self.is_first:
            if x_TC.numel():
                self._send(x_TC, self._ranks[0], self._returning)
            return Present(x_TC)
        parts, works = [x_TC], []
        for rank, count in zip(self._ranks[1:], num_columns[1:], strict=True):
            parts.append(x_TC.new_empty(len(x_TC), count))
            works += self._receive_later(parts[-1], rank)
        return PendingTensors(parts, works)

    def begin_return(self, x: Tensor) -> PendingReceive[Tensor]:
        """Begin to transfer the last stage's tensor to the first stage; x has the same shape everywhere.

        The other stages get x itself. On the first stage x is overwritten.
        """
        if len(self._ranks) == 1 or not x.numel():
            return Present(x)
        if self.is_first:
            return PendingTensors([x], self._receive_later(x, self._ranks[-1]))
        if self._is_last:
            self._send(x, self._ranks[0], self._returning)
        return Present(x)

    def finish_sends(self) -> None:
        """Wait until everything is sent, and free it. All steps must have ended, so that the others have received."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _receive_later(self, x: Tensor, rank: int) -> list[dist.Work]:
        """Begin to receive a tensor on the way back; return what to wait for, nothing for a tensor without values."""
        if not x.numel():
            return []
        work = dist.irecv(x, rank, group=self._returning)
        assert work is not None, "this rank is none of the group"
        return [work]

    def _send(self, x: Tensor, rank: int, group: dist.ProcessGroup | None) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        x = x.contiguous()
        work = dist.isend(x, rank, group=group)
        assert work is not None, "this rank is none of the group"
        self._sent.append((work, x))
        while len(self._sent) > self._most_pending:  # gloo completes a send only when it is waited for
            self._sent.popleft()[0].wait()


class DataParallelGroup:
    """The ranks that compute the same part of attention, each for its own sequences.

    In a group of one rank there is nothing to gather.
    """

    def __init__(self, ranks: Sequence[int] = (0,), rank: int = 0) -> None:
        """Create the view of the rank at index `rank`. `ranks` are all ranks of the group, in order."""
        self._ranks, self.rank = ranks, rank
        self.size = len(ranks)

    def gather_rows(self, x_LC: Tensor, num_rows: Sequence[int]) -> Tensor:
        """Return the concatenated rows of all ranks on the first rank; x itself on the others.

        `num_rows` are the numbers of rows of the ranks.
        """
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
    """Rows in transfer."""

    _rows_NB: Tensor  # kept alive until sent
    _rows_MB: Tensor
    _work: dist.Work

    def wait(self) -> Tensor:
        """Return the rows that this rank receives, [M, B], ordered by sending rank."""
        self._work.wait()
        return self._rows_MB


class RowExchange:
    """All-to-all exchange of rows among the ranks of a stage.

    A rank may send any number of rows to each, including none.
    """

    def __init__(self, handle: dist.ProcessGroup) -> None:
        self._handle = handle
        self.size, self.rank = handle.size(), handle.rank()

    @property
    def handle(self) -> dist.ProcessGroup:
        """The process group of the ranks."""
        return self._handle

    def replace_group(self, handle: dist.ProcessGroup) -> None:
        """Use another group from now on; no rows may be in transfer."""
        self._handle, self.size, self.rank = handle, handle.size(), handle.rank()

    def exchange_counts(self, num_sent_R: Tensor) -> tuple[list[int], list[int]]:
        """Exchange the numbers of rows: return how many rows go to each rank, and how many come from each.

        `num_sent_R` is int64.
        """
        num_received_R = torch.empty_like(num_sent_R)
        dist.all_to_all_single(num_received_R, num_sent_R, group=self._handle)
        return num_sent_R.tolist(), num_received_R.tolist()

    def all_gather(self, x_E: Tensor) -> Tensor:
        """Return each rank's tensor, [R, E], on all ranks."""
        all_RE = [torch.empty_like(x_E) for _ in range(self.size)]
        dist.all_gather(all_RE, x_E, group=self._handle)
        return torch.stack(all_RE)

    def exchange_rows(self, rows_NB: Tensor, num_sent: list[int], num_received: list[int]) -> PendingRows:
        """Send rows, which are in the order of the receiving ranks. Returns at once."""
        rows_MB = rows_NB.new_empty(sum(num_received), rows_NB.shape[1])
        work = dist.all_to_all_single(rows_MB, rows_NB, num_received, num_sent, group=self._handle, async_op=True)
        assert work is not None, "this rank is none of the group"
        return PendingRows(rows_NB, rows_MB, work)

    def send_row_counts(self, num_sent: list[int]) -> PendingRowCounts:
        """Send each rank the number of rows that follow. Return at once. All ranks call it before `exchange_rows`."""
        num_sent_R = torch.tensor(num_sent)  # on the CPU network: the hosts need the counts, not the devices
        num_received_R = torch.empty_like(num_sent_R)
        work = dist.all_to_all_single(num_received_R, num_sent_R, group=self._handle, async_op=True)
        assert work is not None, "this rank is none of the group"
        return PendingRowCounts(num_sent_R, num_received_R, work)


@dataclass(frozen=True, slots=True)
class PendingRowCounts:
    """Numbers of rows in transfer."""

    _num_sent_R: Tensor  # kept alive until sent
    _num_received_R: Tensor
    _work: dist.Work

    def wait(self) -> list[int]:
        """Return how many rows come from each rank."""
        self._work.wait()
        return self._num_received_R.tolist()


class Waited:
    """Seconds that a rank has waited for the work of others. On a GPU only the host's waiting counts."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on(self, coming: PendingReceive[Received_co]) -> Received_co:
        """Wait for a receive, count the time, and return what was received."""
        begin_s = time.perf_counter()
        try:
            return coming.wait()
        finally:
            self.seconds += time.perf_counter() - begin_s


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """Exchange between the attention ranks of a stage, which come first, and the expert ranks.

    Each direction has its own RowExchange, so the results of experts do not queue behind their inputs.
    """

    there: RowExchange
    back: RowExchange
    num_attention: int


class TransferGroup:
    """Group of all ranks for transfers beside the steps.

    One thread of each rank uses it, so that its operations neither delay nor reorder those of the steps. All ranks
    begin the same transfers in the same order.
    """

    def __init__(self, handle: dist.ProcessGroup) -> None:
        self._handle = handle

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send tensors to other ranks, and receive theirs into tensors of the same size.

        Returns when all have arrived; on a GPU, when this is queued on the thread's stream. Each tensor is paired with
        the number of the other rank. Two ranks must list their common tensors in the same order. Raises RuntimeError if
        another rank does not take part within the timeout of the group.
        """
        if any(tensor.is_cuda for _, tensor in (*sends, *receives)):  # NCCL needs all operations of a rank together
            operations = [dist.P2POp(dist.isend, tensor, rank, self._handle) for rank, tensor in sends]
            operations += [dist.P2POp(dist.irecv, tensor, rank, self._handle) for rank, tensor in receives]
            works = dist.batch_isend_irecv(operations)
        else:  # also on groups that are not registered with torch.distributed
            works = [self._handle.send([tensor], rank, 0) for rank, tensor in sends]
            works += [self._handle.recv([tensor], rank, 0) for rank, tensor in receives]
        for work in works:
            work.wait()

    def replace_group(self, handle: dist.ProcessGroup) -> None:
        """Use another group from now on; nothing may be in transfer."""
        self._handle = handle

    def all_succeeded(self, succeeded: bool) -> bool:
        """Return whether all ranks have succeeded; waits for all of them. Raises RuntimeError as `exchange`."""
        num_failed = torch.tensor([int(not succeeded)])  # on the CPU network
        dist.all_reduce(num_failed, group=self._handle)
        return not num_failed.item()


@dataclass(slots=True, eq=False)
class Ranks:
    """A rank's position on the mesh, and the groups that it computes with.

    The position and the groups with expert ranks change when expert ranks are added or removed.
    """

    rank_position: RankPosition = SINGLE_RANK
    tensor: RankCollectives = field(
        default_factory=RankCollectives
    )  # ranks that share attention and dense feed-forwards
    pipeline: Pipeline = field(default_factory=Pipeline)
    everyone: RankCollectives = field(default_factory=RankCollectives)
    across: DataParallelGroup = field(default_factory=DataParallelGroup)  # ranks with other sequences
    experts: RowExchange | None = None  # ranks that share experts, where not every rank has all tokens
    crossings: tuple[
        ExpertExchange, ...
    ] = ()  # with expert ranks: that of its stage; on expert ranks, those of all stages
    waited: Waited = field(default_factory=Waited)  # for the ranks at the other end of `crossings`
    context: RankCollectives = field(default_factory=RankCollectives)  # ranks that divide the positions of a sequence
    transfers: TransferGroup | None = None  # where experts move between ranks
    copies: RankCollectives = field(default_factory=RankCollectives)  # ranks with a copy of the same cache
    draft_experts: RowExchange | None = None  # as `experts`, of a draft model or of MTP layers

    @property
    def num_cache_groups(self) -> int:
        """Number of groups of ranks with requests and a KV cache of their own."""
        return self.across.size // self.rank_position.layout.pcp


SINGLE_RANK_GROUPS = Ranks()
