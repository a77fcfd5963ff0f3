"""KV transfer over several ranks: rank 0's view of the other ranks' parts, and the part of another rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

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

if TYPE_CHECKING:
    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.distribution.rank_group import RankGroup
    from moiety_engine.model.batch import KvCache

POLL_S = 0.005  # interval of polls for a transfer of which this rank's part has arrived
_ADDRESSES = "kv-address"  # store key


def rank_address(listen: str, rank: int) -> str:
    """Return the address on which a rank listens: ports are counted from that of rank 0, unless it is a free one."""
    host, _, port = listen.rpartition(":")
    return f"{host}:{int(port) + rank}" if rank and port.isdigit() and int(port) else listen


def exchange_addresses(rank_group: RankGroup, secret: str, address: str) -> tuple[str, str]:
    """Return the addresses of all ranks with layers, and their host; "" if they do not share memory.

    All ranks with layers must call this at the same point. `secret` authorises transfers to them.
    """
    position = rank_group.ranks.rank_position
    key, ranks = secret.encode()[:64], range(position.layout.attention_ranks)
    given = f"{address} {own_host()}".encode()
    values = exchange_over_store(rank_group.store, key, _ADDRESSES, position.rank, ranks, lambda: given)
    found = [one.decode().split(" ") for one in values]
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
        self._num_parts = rank_group.ranks.rank_position.layout.attention_ranks
        self.send, self._clock = send, clock
        self._polled: dict[str, tuple[float, float]] = {}  # by transfer: first and newest poll

    def progress(self, transfer_id: str, prompt_hash: bytes) -> Progress:
        """Return the progress of a transfer over all ranks, after rank 0's part has arrived.

        Each rank decides itself when its part has stalled. A part that is still not announced `ANNOUNCED_S` after the
        first poll is lost.
        """
        now_s = self._clock()
        first_s, newest_s = self._polled.get(transfer_id, (now_s, 0.0))
        if now_s - newest_s < POLL_S:
            return Progress.COMING
        self._polled[transfer_id] = first_s, now_s
        self.send(PollTransfer(transfer_id, prompt_hash))
        num_there, num_lost, num_unknown = sum_transfer_progress(self._everyone, Progress.THERE)
        if num_there == self._num_parts:
            return Progress.THERE
        is_late = num_unknown > 0 and now_s - first_s > ANNOUNCED_S
        return Progress.LOST if num_lost or is_late else Progress.COMING

    def load(
        self, transfer_id: str, first: int, tables: Sequence[list[int]], firsts: Sequence[int], state_slot: int
    ) -> None:
        """Let the other ranks copy their parts into their caches."""
        self.send(LoadTransfer(transfer_id, first, list(tables), list(firsts), state_slot))

    def drop(self, transfer_id: str) -> None:
        """Let the other ranks drop their parts."""
        self._polled.pop(transfer_id, None)
        self.send(DropTransfer(transfer_id))


def sum_transfer_progress(everyone: RankCollectives, progress: Progress | None) -> tuple[int, int, int]:
    """Return the numbers of ranks that have their part, that have lost it, and to which it was not announced.

    All ranks must call it together. `progress` is that of this rank; None for a rank without a part.
    """
    counted = Progress.THERE, Progress.LOST, Progress.UNKNOWN
    own = torch.tensor([progress is one for one in counted], dtype=torch.int64)
    num_there, num_lost, num_unknown = everyone.sum(own).tolist()
    return num_there, num_lost, num_unknown


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
        """Return the sends of a step; None if there are none."""
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
                sum_transfer_progress(
                    self._rank_group.ranks.everyone,
                    None if staging_buffer is None else _progress(staging_buffer, message),
                )
            case LoadTransfer() if staging_buffer is not None:
                staging_buffer.load(
                    message.transfer_id, message.first, message.tables, message.firsts, message.state_slot
                )
            case DropTransfer() if staging_buffer is not None:
                staging_buffer.drop(message.transfer_id)

    def close(self) -> None:
        """End the threads."""
        if self._sender is not None:
            self._sender.close()
        if self._receiver is not None:
            self._receiver.close()


def _progress(staging_buffer: StagingBuffer, message: PollTransfer) -> Progress:
    progress = staging_buffer.claim(message.transfer_id)
    if progress is Progress.THERE and staging_buffer.arrival(message.transfer_id, message.prompt_hash) is None:
        return Progress.LOST
    return progress
