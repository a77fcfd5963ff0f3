"""Sending of prompts' KV to other engines.

Each step sends what it computes of these prompts layer by layer, while later layers and later parts of the prompt are
computed.

n blocks of a range of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moiety_engine.kv_transfer.kv_layout import form_of, read, read_state, states_of, token_bytes
from moiety_engine.kv_transfer.messages import Begin, KvChunk
from moiety_engine.kv_transfer.sender_thread import SenderThread
from moiety_engine.kv_transfer.staging_buffer import prompt_hash
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.batch import KvCache
from moiety_engine.scheduling.plan import Plan
from moiety_engine.staging import DeviceMark
from moiety_wire.roles import KvHandoff


@dataclass(slots=True)
class _OutgoingPrompt:
    hand_over: KvHandoff
    tokens: list[int]
    has_begun: bool = False
    num_left: int = 0  # tokens that are sent or queued
    offset: int = 0  # bytes that are sent or queued


@dataclass(slots=True)
class _Stretch:
    """Range of tokens of one prompt that this step sends."""

    transfer: _OutgoingPrompt
    first: int
    end: int
    blocks: list[Tensor]  # blocks_n of each cache group; those behind a window are void, as is what is sent of them
    in_block: int  # offset of the first token in its block
    state_slot: int  # slot of the sequence's recurrent state; -1: the model has none


class KvSender:
    """Requests whose KV goes to other engines. Used by the step loop's thread only."""

    def __init__(self, sender: SenderThread) -> None:
        self._sender = sender
        self._open: dict[int, _OutgoingPrompt] = {}  # by request key
        self._problems: dict[int, str] = {}
        self._stream: Any = None  # CUDA stream for copies to the host

    def add_request(self, submit: CoreSubmit) -> None:
        """Register a request for disaggregated prefill."""
        assert submit.hand_over is not None, "the request has no KV transfer"
        self._open[submit.key] = _OutgoingPrompt(submit.hand_over, [*submit.prompt_ids, *(submit.resumed_ids or ())])

    def of(self, plan: Plan, kv: KvCache) -> StepSends | None:
        """Return the sends of the step that is about to run; None if there are none."""
        if not self._open:
            return None
        stretches = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            transfer = self._open.get(sequence.key)
            end = sequence.kv.num_computed + chunk.num_tokens
            if transfer is None or end <= transfer.num_left or not self._has_begun(sequence.key, transfer, kv):
                continue
            first, size = transfer.num_left, kv.block_size  # cached tokens of the prompt are sent with the first step
            device = kv.layers[0].parts[0].device
            tables = [table[first // size : -(-end // size)] for table in sequence.kv.tables]
            blocks = [torch.tensor(table, device=device) for table in tables]
            stretches.append(_Stretch(transfer, first, end, blocks, first % size, sequence.kv.state_slot))
            transfer.num_left = end
        if not stretches:
            return None
        device = kv.layers[0].parts[0].device
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return StepSends(self._sender, kv, stretches, self._stream)

    def ended(self, key: int, *, prefill_done: bool) -> str:
        """Finish the transfer of a request that has ended. Return why its KV was not sent, or ""."""
        problem = self._problems.pop(key, "")
        transfer = self._open.pop(key, None)
        if transfer is None:
            return problem
        transfer_id = transfer.hand_over.transfer_id
        if prefill_done and transfer.num_left == len(transfer.tokens):
            return self._sender.end(transfer_id)
        self._sender.cancel(transfer_id)
        return "the prompt is not completely computed" if prefill_done else ""

    def close(self) -> None:
        self._sender.close()

    def _has_begun(self, key: int, transfer: _OutgoingPrompt, kv: KvCache) -> bool:
        """Announce the transfer if it is not announced yet. Return whether it has begun.

        The announcement waits until the prompt is being computed, since the receiver reserves memory for it.
        """
        if transfer.has_begun:
            return True
        form, states, tokens = form_of(kv), states_of(kv), transfer.tokens
        num_bytes = len(tokens) * token_bytes(form) + token_bytes(states)
        begin = Begin(
            transfer.hand_over.transfer_id,
            len(tokens),
            num_bytes,
            prompt_hash(tokens),
            form,
            rotation=kv.rotation,
            token=transfer.hand_over.token,
            windows=kv.windows,
            states=states,
        )
        problem = self._sender.begin(transfer.hand_over, begin)
        if problem:
            self._problems[key] = problem
            del self._open[key]
        transfer.has_begun = not problem
        return transfer.has_begun


class StepSends:
    """Sends of one step; called after each layer has stored its keys and values, or its states."""

    def __init__(self, sender: SenderThread, kv: KvCache, stretches: Sequence[_Stretch], stream: Any) -> None:
        """Create the sends. `stream` is used for copies to the host; None where no copy is needed."""
        self._sender, self._kv, self._stretches, self._stream = sender, kv, stretches, stream
        self._token_caches, self._state_caches = kv.token_caches, kv.state_caches
        self._number = {layer: number for number, layer in enumerate((*self._token_caches, *self._state_caches))}

    def __call__(self, layer: int) -> None:
        if layer not in self._number:
            return  # it reads the keys and values of an earlier layer
        states = self._state_caches.get(layer)
        for stretch in self._stretches:
            first, end = stretch.first, stretch.end
            if states is None:
                blocks_n = stretch.blocks[self._kv.groups[layer]]
                rows = read(self._token_caches[layer], blocks_n, stretch.in_block, end - first)
            elif end == len(stretch.transfer.tokens):
                rows, first = read_state(states, stretch.state_slot), end - 1
            else:
                continue
            transfer = stretch.transfer
            piece = KvChunk(transfer.hand_over.transfer_id, self._number[layer], first, end, transfer.offset)
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
