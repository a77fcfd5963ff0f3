"""Connector of one engine for KV transfer, according to its role."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moiety_engine.config import TransferConfig
from moiety_engine.distribution.layout import SINGLE_RANK, RankPosition
from moiety_engine.errors import InvalidConfig
from moiety_engine.kv_transfer.cache_shards import CacheShare, share_on_rank
from moiety_engine.kv_transfer.kv_receiver import KvReceiver
from moiety_engine.kv_transfer.kv_sender import KvSender
from moiety_engine.kv_transfer.nixl_memory import receiver_of, sender_of
from moiety_engine.kv_transfer.rank_messages import OpenReceiver, TransferMessage
from moiety_engine.kv_transfer.rank_sender import RankSender
from moiety_engine.kv_transfer.rank_transfers import (
    GroupTransferProgress,
    RankTransfers,
    exchange_addresses,
    rank_address,
)
from moiety_engine.kv_transfer.receiver_thread import ReceiverThread
from moiety_engine.kv_transfer.sender_thread import SenderThread
from moiety_engine.kv_transfer.staging_buffer import StagingBuffer
from moiety_engine.kv_transfer.transports import own_host
from moiety_engine.memory import available_bytes
from moiety_engine.messages import CoreFailure, CoreFinish, CoreOutput, CoreSubmit
from moiety_engine.model.batch import KvCache
from moiety_wire.messages import FinishReason
from moiety_wire.roles import EngineRole, KvRanks

if TYPE_CHECKING:
    from moiety_engine.distribution.rank_group import RankGroup
    from moiety_engine.model.transformer import Transformer

_SHARE_OF_HOST = 0.1


class KvConnector:
    """KV transfer of one engine. Used by the step loop's thread.

    `kv_sender` is set on an engine that prefills for others, `kv_receiver` on one that receives KV.
    """

    def __init__(
        self,
        kv_sender: KvSender | None = None,
        kv_receiver: KvReceiver | None = None,
        staging_buffer: StagingBuffer | None = None,
        receiver: ReceiverThread | None = None,
        addresses: str = "",
        host: str = "",
        ranks: KvRanks | None = None,
    ) -> None:
        """Create the connector.

        `addresses` are those of all ranks that receive KV, in order; `host` is their host, if they have a common one.
        `ranks` divide the KV; None: there is one rank.
        """
        self._addresses, self._host = addresses, host
        self.ranks = ranks or KvRanks()
        self.kv_sender, self.kv_receiver = kv_sender, kv_receiver
        self._staging_buffer, self._receiver = staging_buffer, receiver
        self.prefill_done_requests_total = 0
        self._unsent_total = 0

    @property
    def address(self) -> str:
        """Addresses of the ranks that receive KV, in order of the ranks, with commas; "" if none is received."""
        return self._addresses

    @property
    def host(self) -> str:
        return self._host

    @property
    def secret(self) -> str:
        """Secret with which gateways authorise transfers; "" if no KV is received."""
        return "" if self._receiver is None else self._receiver.secret

    @property
    def num_waiting(self) -> int:
        """Requests whose KV has not arrived yet."""
        return 0 if self.kv_receiver is None else self.kv_receiver.num_waiting

    @property
    def lost_transfers_total(self) -> int:
        """Requests whose KV was not sent by this engine, or has not arrived at it."""
        return self._unsent_total + (0 if self.kv_receiver is None else self.kv_receiver.lost_transfers_total)

    def serve(self, kv: KvCache | None) -> None:
        """Set the cache for received KV; None while the engine sleeps."""
        if self._staging_buffer is not None:
            self._staging_buffer.serve(kv)

    def depart(self, submit: CoreSubmit) -> CoreSubmit:
        """Register a request for disaggregated prefill, and return it limited to its next token."""
        num_tokens = len(submit.resumed_ids or ()) + 1
        if self.kv_sender is None or submit.embed or submit.max_tokens <= num_tokens:
            return msgspec.structs.replace(submit, hand_over=None)
        self.kv_sender.add_request(submit)
        return msgspec.structs.replace(submit, max_tokens=num_tokens)

    def num_transferred_tokens(self, key: int) -> int:
        """Return the number of tokens of a request whose KV has arrived."""
        arrival = None if self.kv_receiver is None else self.kv_receiver.arrival_of(key)
        return 0 if arrival is None else arrival.num_tokens

    def with_transfer_results(self, outputs: list[CoreOutput], failures: list[CoreFailure]) -> list[CoreOutput]:
        """Return the outputs for the engine server, with the transfer result of the requests that end.

        The result is the transfer times of received KV, or the reason why KV was not sent.
        """
        if self.kv_sender is None and self.kv_receiver is None:
            return outputs
        for failure in failures:
            self._ended(failure.key, prefill_done=False)
        return [output if output.finish is None else self._end(output, output.finish) for output in outputs]

    def close(self) -> None:
        """End the threads."""
        if self.kv_sender is not None:
            self.kv_sender.close()
        if self._receiver is not None:
            self._receiver.close()

    def _end(self, output: CoreOutput, finish: CoreFinish) -> CoreOutput:
        arrival = None if self.kv_receiver is None else self.kv_receiver.arrival_of(output.key)
        prefill_done = finish.reason is FinishReason.PREFILL_DONE
        self.prefill_done_requests_total += prefill_done
        problem = self._ended(output.key, prefill_done=prefill_done)
        self._unsent_total += bool(prefill_done and problem)
        if arrival is None and not problem:
            return output
        finish = msgspec.structs.replace(finish, arrival=arrival, detail=problem or finish.detail)
        return msgspec.structs.replace(output, finish=finish)

    def _ended(self, key: int, *, prefill_done: bool) -> str:
        if self.kv_receiver is not None:
            self.kv_receiver.ended(key)
        return "" if self.kv_sender is None else self.kv_sender.ended(key, prefill_done=prefill_done)


NO_CONNECTOR = KvConnector()


def connector_of(
    config: TransferConfig,
    model: Transformer,
    rank_group: RankGroup | None = None,
    send: Callable[[TransferMessage], None] = lambda _: None,
) -> KvConnector:
    """Return the connector of the configuration on rank 0.

    `rank_group` is the group of several ranks, which `send` sends messages to. Raises InvalidConfig if the address or
    the key is unusable.
    """
    if config.role is EngineRole.BOTH and not config.listen:
        return NO_CONNECTOR
    key, position = _read_key(config.key_file), _position(rank_group)
    max_bytes, share = _buffer_bytes(config, position), _share(model)
    kv_sender = None
    if config.role is EngineRole.PREFILL:
        thread = SenderThread(config.transport, max_bytes, key, sender_of(config, max_bytes))
        kv_sender = KvSender(RankSender(thread, share), send)
    if not config.listen:
        return KvConnector(kv_sender)
    staging_buffer = StagingBuffer(max_bytes, share, receiver_of(config))
    receiver = ReceiverThread(config.listen, staging_buffer, key)
    if rank_group is None:
        return KvConnector(
            kv_sender, KvReceiver(staging_buffer), staging_buffer, receiver, receiver.address, own_host()
        )
    send(OpenReceiver(receiver.secret))
    addresses, host = exchange_addresses(rank_group, receiver.secret, receiver.address)
    kv_receiver = KvReceiver(staging_buffer, GroupTransferProgress(rank_group, send))
    return KvConnector(kv_sender, kv_receiver, staging_buffer, receiver, addresses, host, share.ranks)


def rank_transfers_of(config: TransferConfig, model: Transformer, rank_group: RankGroup) -> RankTransfers | None:
    """Return the transfers of a rank other than rank 0; None without KV transfer. Raises InvalidConfig."""
    if config.role is EngineRole.BOTH and not config.listen:
        return None
    key, position = _read_key(config.key_file), rank_group.ranks.rank_position
    max_bytes, share = _buffer_bytes(config, position), _share(model)
    sender = None
    if config.role is EngineRole.PREFILL:
        group = None if position.copy_rank else position.cache_group
        thread = SenderThread(config.transport, max_bytes, key, sender_of(config, max_bytes))
        sender = RankSender(thread, share, group)
    staging_buffer = StagingBuffer(max_bytes, share, receiver_of(config)) if config.listen else None
    listen = rank_address(config.listen, position.rank)
    return RankTransfers(
        rank_group,
        sender,
        staging_buffer,
        lambda staging_buffer, secret: ReceiverThread(listen, staging_buffer, key, secret),
    )


def _position(rank_group: RankGroup | None) -> RankPosition:
    return SINGLE_RANK if rank_group is None else rank_group.ranks.rank_position


def _buffer_bytes(config: TransferConfig, position: RankPosition) -> int:
    """Return the bytes of a buffer; by default, the ranks share a part of the host's memory."""
    return config.buffer_bytes or max(1, int(available_bytes() * _SHARE_OF_HOST / position.layout.attention_ranks))


def _share(model: Transformer) -> CacheShare:
    return share_on_rank(model.spec, model.ranks.rank_position, keeps_hidden=model.keeps_hidden)


def _read_key(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes().strip()
    except OSError as exc:
        raise InvalidConfig(f"the key file {path} cannot be read: {exc.strerror}") from exc
