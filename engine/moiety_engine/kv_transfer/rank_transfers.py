"""KV transfer over several ranks: rank 0's view of the other ranks' parts, and the part of another rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_engine.config import KvTransport
from moiety_engine.distribution.layout import RankPosition
from moiety_engine.distribution.rank_requests import exchange_over_store
from moiety_engine.kv_transfer.rank_messages import (
    ADDRESS_SEPARATOR,
    DropTransfer,
    EndSend,
    LoadTransfer,
    OpenReceiver,
    PollTransfer,
    SendRange,
    TransferMessage,
)
from moiety_engine.kv_transfer.rank_sender import RankSender, StepSends
from moiety_engine.kv_transfer.receiver_thread import ReceiverThread
from moiety_engine.kv_transfer.staging_buffer import ANNOUNCED_S, Progress, StagingBuffer
from moiety_engine.kv_transfer.transports import own_host
from moiety_wire.roles import KvTransferTimes, transfer_group

if TYPE_CHECKING:
    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.distribution.rank_group import RankGroup
    from moiety_engine.model.batch import KvCache

POLL_S = 0.005  # interval of polls for a transfer of which this rank's part has arrived
POLL_GROUP_S = 0.02  # interval of polls for a transfer to a group without rank 0
_TRANSPORTS = tuple(one.value for one in KvTransport)
_NUM_TIMES = len(KvTransferTimes.__struct_fields__)
_ADDRESSES = "kv-address"  # store key


def rank_address(listen: str, rank: int) -> str:
    """Return the address on which a rank listens: ports are counted from that of rank 0, unless it is a free one."""
    host, _, port = listen.rpartition(":")
    return f"{host}:{int(port) + rank}" if rank and port.isdigit() and int(port) else listen


def exchange_addresses(rank_group: RankGroup, secret: str, address: str) -> tuple[str, str]:
    """Return the addresses of the ranks that receive KV, and their host; "" if they do not share memory.

    Of the ranks with copies of a cache, the first one receives. All ranks with layers must call this at the same point.
    `secret` authorises transfers to them.
    """
    position = rank_group.ranks.rank_position
    key, ranks = secret.encode()[:64], range(position.layout.attention_ranks)
    given = f"{address} {own_host()}".encode()
    values = exchange_over_store(rank_group.store, key, _ADDRESSES, position.rank, ranks, lambda: given)
    receivers = [rank for rank in ranks if not RankPosition(position.layout, rank).copy_rank]
    found = [values[rank].decode().split(" ") for rank in receivers]
    hosts = {host for _, host in found}
    return ADDRESS_SEPARATOR.join(one for one, _ in found), hosts.pop() if len(hosts) == 1 else ""


class GroupTransferProgress:
    """Other ranks of an engine with KV transfer, as rank 0 sees them. Used by the step loop's thread only."""

    def __init__(
        self,
        rank_group: RankGroup,
        send: Callable[[TransferMessage], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._everyone = rank_group.ranks.everyone
        layout = rank_group.ranks.rank_position.layout
        self._num_parts, self._num_groups = layout.pp * layout.tp, layout.num_caches
        self.copies = rank_group.ranks.copies
        self.send, self._clock = send, clock
        self._polled: dict[str, tuple[float, float]] = {}  # by transfer: first and newest poll
        self._times: dict[str, KvTransferTimes] = {}  # of transfers to groups without rank 0

    def has_rank_0(self, transfer_id: str) -> bool:
        """Return whether the transfer goes to the group of rank 0, which then has a part of it."""
        return transfer_group(transfer_id, self._num_groups) == 0

    def progress(self, transfer_id: str, prompt_hash: bytes) -> Progress:
        """Return the progress of a transfer over all ranks of its group, after rank 0's part, if any, has arrived.

        Each rank decides itself when its part has stalled. A part that is still not announced `ANNOUNCED_S` after the
        first poll is lost.
        """
        now_s, has_part = self._clock(), self.has_rank_0(transfer_id)
        first_s, newest_s = self._polled.get(transfer_id, (now_s, 0.0))
        if now_s - newest_s < (POLL_S if has_part else POLL_GROUP_S):
            return Progress.COMING
        self._polled[transfer_id] = first_s, now_s
        self.send(PollTransfer(transfer_id, prompt_hash))
        found = sum_transfer_progress(self._everyone, Progress.THERE if has_part else None)
        if found.num_there == self._num_parts:
            self._times[transfer_id] = found.times
            return Progress.THERE
        is_late = found.num_unknown > 0 and now_s - first_s > ANNOUNCED_S
        return Progress.LOST if found.num_lost or is_late else Progress.COMING

    def arrival(self, transfer_id: str) -> KvTransferTimes | None:
        """Return the transfer times of a transfer to a group without rank 0 that is complete there; else None."""
        return self._times.get(transfer_id)

    def load(
        self, transfer_id: str, first: int, tables: Sequence[list[int]], firsts: Sequence[int], state_slot: int
    ) -> None:
        """Let the other ranks copy their parts into their caches."""
        self.send(LoadTransfer(transfer_id, first, list(tables), list(firsts), state_slot))

    def drop(self, transfer_id: str) -> None:
        """Let the other ranks drop their parts."""
        self._polled.pop(transfer_id, None)
        self._times.pop(transfer_id, None)
        self.send(DropTransfer(transfer_id))


class TransferSum(NamedTuple):
    """Numbers of ranks that have their part, that have lost it, and to which it was not announced."""

    num_there: int
    num_lost: int
    num_unknown: int
    times: KvTransferTimes  # of the rank that gave some; meaningless if none did


def sum_transfer_progress(
    everyone: RankCollectives, progress: Progress | None, times: KvTransferTimes | None = None
) -> TransferSum:
    """Return the progress of a transfer over all ranks.

    All ranks must call it together. `progress` is that of this rank; None for a rank without a part. `times` are given
    by at most one rank.
    """
    counted = Progress.THERE, Progress.LOST, Progress.UNKNOWN
    own = [int(progress is one) for one in counted]
    if times is None:
        own += [0] * _NUM_TIMES
    else:
        own += [times.begun_unix_ns, times.ended_unix_ns, times.num_tokens, times.num_bytes]
        own.append(_TRANSPORTS.index(times.transport))
    there, lost, unknown, begun_ns, ended_ns, num_tokens, num_bytes, transport = everyone.sum(
        torch.tensor(own, dtype=torch.int64)
    ).tolist()
    found = KvTransferTimes(begun_ns, ended_ns, num_tokens, num_bytes, _TRANSPORTS[transport])
    return TransferSum(there, lost, unknown, found)


class RankTransfers:
    """KV transfer of a rank other than rank 0. Used by the thread that executes control messages."""

    def __init__(
        self,
        rank_group: RankGroup,
        sender: RankSender | None,
        staging_buffer: StagingBuffer | None,
        open_receiver: Callable[[StagingBuffer, str], ReceiverThread],
    ) -> None:
        """Create the part. `open_receiver(staging_buffer, secret)` starts to listen."""
        self._rank_group, self._sender, self._staging_buffer = rank_group, sender, staging_buffer
        self._open_receiver = open_receiver
        self._receiver: ReceiverThread | None = None

    def serve(self, kv: KvCache | None) -> None:
        """Set the cache for received KV; None while the engine sleeps."""
        if self._staging_buffer is not None:
            self._staging_buffer.serve(kv)

    def sends(self, ranges: Sequence[SendRange], kv: KvCache) -> StepSends | None:
        """Return the sends of a step; None if no rank sends anything."""
        return None if self._sender is None else self._sender.sends(ranges, kv)

    def execute(self, message: TransferMessage) -> None:
        """Execute a control message. Raises InvalidConfig if the address cannot be bound."""
        staging_buffer = self._staging_buffer
        match message:
            case EndSend():
                if self._sender is not None:
                    problem = self._sender.end(message.transfer_id, is_complete=message.is_complete)
                    self._sender.log_not_sent(problem)
            case OpenReceiver() if staging_buffer is not None:
                self._receiver = self._open_receiver(staging_buffer, message.secret)
                exchange_addresses(self._rank_group, message.secret, self._receiver.address)
            case PollTransfer():
                self._report(message)
            case LoadTransfer() if staging_buffer is not None:
                loaded = message.first, message.tables, message.firsts
                if self._has_part(message.transfer_id):
                    staging_buffer.load(message.transfer_id, *loaded, message.state_slot)
                staging_buffer.share_loaded(self._rank_group.ranks.copies, *loaded)
            case DropTransfer() if staging_buffer is not None:
                staging_buffer.drop(message.transfer_id)

    def close(self) -> None:
        """End the threads."""
        if self._sender is not None:
            self._sender.close()
        if self._receiver is not None:
            self._receiver.close()

    def _has_part(self, transfer_id: str) -> bool:
        position = self._rank_group.ranks.rank_position
        is_of_group = transfer_group(transfer_id, position.layout.num_caches) == position.cache_group
        return is_of_group and not position.copy_rank

    def _report(self, message: PollTransfer) -> None:
        """Report whether this rank's part has arrived; the first rank of another group than rank 0's also reports when.

        A part of another prompt is lost.
        """
        position, staging_buffer = self._rank_group.ranks.rank_position, self._staging_buffer
        progress: Progress | None = None
        times: KvTransferTimes | None = None
        if staging_buffer is not None and self._has_part(message.transfer_id):
            progress = staging_buffer.claim(message.transfer_id)
            if progress is Progress.THERE:
                times = staging_buffer.arrival(message.transfer_id, message.prompt_hash)
                progress = Progress.LOST if times is None else progress
        is_first = position.dp_rank > 0 and position.rank == position.layout.groups[position.dp_rank][0]
        sum_transfer_progress(self._rank_group.ranks.everyone, progress, times if is_first else None)
