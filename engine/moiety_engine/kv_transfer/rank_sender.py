"""One rank's sender of prompts' KV: sends what a step computes of them layer by layer, while later layers are computed.

Each rank of the other engine that needs shards of this rank's cache gets them in a transfer of its own.

n blocks of a range of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog
import torch
from torch import Tensor

from moiety_engine.distribution.layout import Layout
from moiety_engine.kv_transfer.cache_shards import CacheShare
from moiety_engine.kv_transfer.kv_layout import ShardViews
from moiety_engine.kv_transfer.messages import Begin, KvChunk
from moiety_engine.kv_transfer.rank_messages import SendBegin, SendRange
from moiety_engine.kv_transfer.sender_thread import SenderThread
from moiety_engine.model.batch import KvCache
from moiety_engine.staging import DeviceMark
from moiety_wire.roles import KvHandoff, transfer_group

log = structlog.get_logger()


class _Shard(NamedTuple):
    """Shard of one layer for one receiver."""

    layer: int  # among those that this receiver gets
    state: int  # among those with states; -1: the layer has rows of every token


@dataclass(slots=True)
class _Outgoing:
    """KV of a prompt that one rank of the other engine gets."""

    address: str
    views: ShardViews
    shards: dict[int, list[_Shard]]  # by number of the layer on this rank
    offset: int = 0  # bytes that are sent or queued


@dataclass(slots=True)
class _OutgoingPart:
    """Part of a prompt's KV that this rank sends."""

    transfer_id: str
    num_tokens: int
    receivers: list[_Outgoing]


@dataclass(slots=True)
class _SentBlocks:
    """Range of tokens of one prompt that this step sends."""

    transfer: _OutgoingPart
    first: int
    end: int
    blocks: list[Tensor]  # blocks_n of each cache group; those behind a window are void, as is what is sent of them
    state_slot: int  # slot of the sequence's recurrent state; -1: the model has none


class RankSender:
    """Sender of one rank. Used by the thread that runs the steps."""

    def __init__(self, sender: SenderThread, share: CacheShare, group: int | None = 0) -> None:
        """Create the sender of the rank of this group that has this share of the cache.

        A sender without a group sends nothing: the rank has a copy of a cache that another rank sends.
        """
        self._sender, self._share, self.group = sender, share, group
        self._open: dict[str, _OutgoingPart] = {}
        self._stream: Any = None  # CUDA stream for copies to the host

    def begin(self, transfer_id: str, begin: SendBegin, kv: KvCache) -> str:
        """Announce this rank's part to each rank that needs some of it. Return why it is not possible, or ""."""
        share, ranks = self._share, begin.ranks
        if reason := share.why_incompatible(ranks):
            return reason
        if len(begin.addresses) != ranks.tp * ranks.pp * ranks.groups:
            return (
                f"the gateway names {len(begin.addresses)} KV addresses of an engine with --tp {ranks.tp}, --pp "
                f"{ranks.pp} and {ranks.groups} groups: run the same release of the gateway and all engines"
            )
        groups = Layout(tp=ranks.tp, pp=ranks.pp, dp=ranks.groups).groups
        addresses = [begin.addresses[rank] for rank in groups[transfer_group(transfer_id, ranks.groups)]]
        transfer = _OutgoingPart(transfer_id, begin.num_tokens, [])
        for rank, shards in share.shards_to(ranks).items():
            try:
                views = ShardViews(kv, share, shards)
            except ValueError as exc:
                problem = f"its cache cannot be divided for the other engine: {exc}"
            else:
                announced = Begin(
                    transfer_id,
                    begin.num_tokens,
                    views.num_bytes(begin.num_tokens),
                    begin.prompt_hash,
                    views.form,
                    rotation=kv.rotation,
                    token=begin.token,
                    windows=kv.windows,
                    states=views.state_form,
                    ranks=share.ranks,
                    rank=share.rank,
                    shards=shards,
                )
                address = addresses[rank]
                problem = self._sender.begin(KvHandoff(transfer_id, address, begin.host, begin.token), announced)
            if problem:
                self._cancel(transfer)
                return problem
            transfer.receivers.append(_Outgoing(address, views, _shards_by_layer(views)))
        self._open[transfer_id] = transfer
        return ""

    def sends(self, ranges: Sequence[SendRange], kv: KvCache) -> StepSends | None:
        """Return the sends of a step; None if no rank sends anything.

        The sends are empty where only other ranks send, because all ranks of a step must agree whether it sends: such a
        pass is not run again. A transfer that cannot begin on a rank other than rank 0 is not sent. The receiver counts
        this rank's part as lost, because it is never announced.
        """
        if not ranges:
            return None
        device = kv.layers[0].parts[0].device
        sent_blocks = []
        for one in ranges:
            if one.group != self.group:
                continue
            if one.begin is not None and one.transfer_id not in self._open:
                self.log_not_sent(self.begin(one.transfer_id, one.begin, kv))
            transfer = self._open.get(one.transfer_id)
            if transfer is not None:
                blocks = [torch.tensor(table, device=device) for table in one.tables]
                sent_blocks.append(_SentBlocks(transfer, one.first, one.end, blocks, one.state_slot))
        if sent_blocks and device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return StepSends(self._sender, kv, sent_blocks, self._stream)

    def end(self, transfer_id: str, *, is_complete: bool) -> str:
        """End a transfer, or cancel it if it is not complete. Return why a receiver refused it, if that is known."""
        transfer = self._open.pop(transfer_id, None)
        if transfer is None:
            return ""
        if not is_complete:
            self._cancel(transfer)
            return ""
        problems = [self._sender.end(transfer_id, one.address) for one in transfer.receivers]
        problem = next(filter(None, problems), "")
        if problem:
            self._cancel(transfer)
        return problem

    def log_not_sent(self, problem: str) -> None:
        """Log why this rank's part was not sent; "" logs nothing."""
        if problem:
            log.warning(
                "kv_part_not_sent",
                rank=self._share.rank,
                reason=problem,
                advice="none needed: the decode engine computes the prompt; if it recurs, see the reason",
            )

    def close(self) -> None:
        self._sender.close()

    def _cancel(self, transfer: _OutgoingPart) -> None:
        for one in transfer.receivers:
            self._sender.cancel(transfer.transfer_id, one.address)


class StepSends:
    """Sends of one step; called after each layer has stored its keys and values, or its states."""

    def __init__(self, sender: SenderThread, kv: KvCache, sent_blocks: Sequence[_SentBlocks], stream: Any) -> None:
        """Create the sends. `stream` is used for copies to the host; None where no copy is needed."""
        self._sender, self._kv, self._sent_blocks, self._stream = sender, kv, sent_blocks, stream

    def __call__(self, layer: int) -> None:
        for blocks_sent in self._sent_blocks:
            for receiver in blocks_sent.transfer.receivers:
                # without any, this rank does not send the layer, or it reads keys and values of another one
                for shard in receiver.shards.get(layer, ()):
                    self._send(layer, blocks_sent, receiver, shard)

    def _send(self, layer: int, blocks_sent: _SentBlocks, receiver: _Outgoing, shard: _Shard) -> None:
        first, end = blocks_sent.first, blocks_sent.end
        if shard.state < 0:
            blocks_n = blocks_sent.blocks[self._kv.groups[layer]]
            rows = receiver.views.read_rows(shard.layer, blocks_n, first, end)
        elif end == blocks_sent.transfer.num_tokens:
            rows, first = receiver.views.read_state(shard.state, blocks_sent.state_slot), end - 1
        else:
            return
        piece = KvChunk(blocks_sent.transfer.transfer_id, shard.layer, first, end, receiver.offset)
        receiver.offset += sum(row.nbytes for row in rows)
        self._sender.put(receiver.address, piece, *self._on_host(rows))

    def _on_host(self, rows: list[Tensor]) -> tuple[list[Tensor], DeviceMark]:
        """Copy rows to the host. On a GPU the copies overlap with the computation of later layers."""
        stream = self._stream
        if stream is None:
            return rows, DeviceMark(None)
        stream.wait_stream(torch.cuda.current_stream(rows[0].device))
        with torch.cuda.stream(stream):
            copies = []
            for row in rows:
                row.record_stream(stream)
                copies.append(torch.empty_like(row, device="cpu", pin_memory=True).copy_(row, non_blocking=True))
            return copies, DeviceMark(stream.record_event())


def _shards_by_layer(views: ShardViews) -> dict[int, list[_Shard]]:
    num_paged, found = len(views.paged), dict[int, list[_Shard]]()
    for index, number in enumerate(views.numbers):
        found.setdefault(number, []).append(_Shard(index, max(-1, index - num_paged)))
    return found
