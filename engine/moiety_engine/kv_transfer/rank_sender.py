"""One rank's sender of prompts' KV: sends what a step computes of them layer by layer, while later layers are computed.

n blocks of a range of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor

from moiety_engine.kv_transfer.kv_layout import form_of, read, read_state, states_of, token_bytes
from moiety_engine.kv_transfer.messages import Begin, KvChunk
from moiety_engine.kv_transfer.rank_messages import SendBegin, SendRange
from moiety_engine.kv_transfer.sender_thread import SenderThread
from moiety_engine.model.batch import KvCache
from moiety_engine.staging import DeviceMark
from moiety_wire.roles import KvHandoff

log = structlog.get_logger()


@dataclass(slots=True)
class _OutgoingPart:
    """This rank's part of a prompt's KV."""

    transfer_id: str
    num_tokens: int
    offset: int = 0  # bytes that are sent or queued


@dataclass(slots=True)
class _SentBlocks:
    """Range of tokens of one prompt that this step sends."""

    transfer: _OutgoingPart
    first: int
    end: int
    blocks: list[Tensor]  # blocks_n of each cache group; those behind a window are void, as is what is sent of them
    in_block: int  # offset of the first token in its block
    state_slot: int  # slot of the sequence's recurrent state; -1: the model has none


class RankSender:
    """Sender of one rank. Used by the thread that runs the steps."""

    def __init__(self, sender: SenderThread, rank: int = 0, num_parts: int = 1, part: str = "") -> None:
        """Create the sender of `rank`, whose part is one of `num_parts` and named `part`."""
        self._sender, self._rank, self._num_parts, self._part = sender, rank, num_parts, part
        self._open: dict[str, _OutgoingPart] = {}
        self._stream: Any = None  # CUDA stream for copies to the host

    def begin(self, transfer_id: str, begin: SendBegin, kv: KvCache) -> str:
        """Announce this rank's part. Return why it is not possible, or ""."""
        if len(begin.addresses) != self._num_parts:
            return (
                f"the other engine has {len(begin.addresses)} ranks with layers, and this one {self._num_parts}: start "
                "both with the same --tp and --pp"
            )
        form, states = form_of(kv), states_of(kv)
        announced = Begin(
            transfer_id,
            begin.num_tokens,
            begin.num_tokens * token_bytes(form) + token_bytes(states),
            begin.prompt_hash,
            form,
            rotation=kv.rotation,
            token=begin.token,
            windows=kv.windows,
            states=states,
            part=self._part,
        )
        target = KvHandoff(transfer_id, begin.addresses[self._rank], begin.host, begin.token)
        problem = self._sender.begin(target, announced)
        if not problem:
            self._open[transfer_id] = _OutgoingPart(transfer_id, begin.num_tokens)
        return problem

    def sends(self, ranges: Sequence[SendRange], kv: KvCache) -> StepSends | None:
        """Return the sends of a step; None if there are none.

        A transfer that cannot begin on a rank other than rank 0 is not sent. The receiver counts this rank's part as
        lost, because it is never announced.
        """
        device = kv.layers[0].parts[0].device
        sent_blocks = []
        for one in ranges:
            if one.begin is not None and one.transfer_id not in self._open:
                self.log_not_sent(self.begin(one.transfer_id, one.begin, kv))
            transfer = self._open.get(one.transfer_id)
            if transfer is not None:
                blocks = [torch.tensor(table, device=device) for table in one.tables]
                sent_blocks.append(_SentBlocks(transfer, one.first, one.end, blocks, one.in_block, one.state_slot))
        if not sent_blocks:
            return None
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return StepSends(self._sender, kv, sent_blocks, self._stream)

    def end(self, transfer_id: str, *, is_complete: bool) -> str:
        """End a transfer, or cancel it if it is not complete. Return why the receiver refused it, if that is known."""
        if self._open.pop(transfer_id, None) is not None and is_complete:
            return self._sender.end(transfer_id)
        self._sender.cancel(transfer_id)
        return ""

    def log_not_sent(self, problem: str) -> None:
        """Log why this rank's part was not sent; "" logs nothing."""
        if problem:
            log.warning(
                "kv_part_not_sent",
                rank=self._rank,
                reason=problem,
                advice="none needed: the decode engine computes the prompt; if it recurs, see the reason",
            )

    def close(self) -> None:
        self._sender.close()


class StepSends:
    """Sends of one step; called after each layer has stored its keys and values, or its states."""

    def __init__(self, sender: SenderThread, kv: KvCache, sent_blocks: Sequence[_SentBlocks], stream: Any) -> None:
        """Create the sends. `stream` is used for copies to the host; None where no copy is needed."""
        self._sender, self._kv, self._sent_blocks, self._stream = sender, kv, sent_blocks, stream
        self._token_caches, self._state_caches = kv.token_caches, kv.state_caches
        self._number = {layer: number for number, layer in enumerate((*self._token_caches, *self._state_caches))}

    def __call__(self, layer: int) -> None:
        if layer not in self._number:
            return  # it reads the keys and values of an earlier layer
        states = self._state_caches.get(layer)
        for blocks_sent in self._sent_blocks:
            first, end = blocks_sent.first, blocks_sent.end
            if states is None:
                blocks_n = blocks_sent.blocks[self._kv.groups[layer]]
                rows = read(self._token_caches[layer], blocks_n, blocks_sent.in_block, end - first)
            elif end == blocks_sent.transfer.num_tokens:
                rows, first = read_state(states, blocks_sent.state_slot), end - 1
            else:
                continue
            transfer = blocks_sent.transfer
            piece = KvChunk(transfer.transfer_id, self._number[layer], first, end, transfer.offset)
            transfer.offset += sum(row.nbytes for row in rows)
            self._sender.put(piece, *self._on_host(rows))

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
