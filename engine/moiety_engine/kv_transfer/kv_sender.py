"""Sending of prompts' KV to other engines.

Each step sends what it computes of these prompts layer by layer, while later layers and later parts of the prompt are
computed. Every rank sends its own part (`rank_sender.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moiety_engine.kv_transfer.rank_messages import ADDRESS_SEPARATOR, EndSend, SendBegin, SendRange
from moiety_engine.kv_transfer.rank_sender import RankSender
from moiety_engine.kv_transfer.staging_buffer import prompt_hash
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.batch import KvCache
from moiety_engine.scheduling.plan import Plan
from moiety_wire.roles import KvHandoff

_MOVED = "the prompt was preempted and continued by another group of ranks"


@dataclass(slots=True)
class _OutgoingPrompt:
    hand_over: KvHandoff
    tokens: list[int]
    begin: SendBegin | None = None
    group: int = 0  # of ranks that compute the prompt
    num_left: int = 0  # tokens that are sent or queued


class KvSender:
    """Requests whose KV goes to other engines. Used by the step loop's thread only."""

    def __init__(self, sender: RankSender, end_others: Callable[[EndSend], None] = lambda _: None) -> None:
        """Create the sender. `end_others` ends a transfer at the other ranks."""
        self.own, self._end_others = sender, end_others
        self._open: dict[int, _OutgoingPrompt] = {}  # by request key
        self._problems: dict[int, str] = {}

    def add_request(self, submit: CoreSubmit) -> None:
        """Register a request for disaggregated prefill."""
        assert submit.hand_over is not None, "the request has no KV transfer"
        self._open[submit.key] = _OutgoingPrompt(submit.hand_over, [*submit.prompt_ids, *(submit.resumed_ids or ())])

    def of(self, plan: Plan, kv: KvCache) -> list[SendRange]:
        """Return the ranges that the step that is about to run sends, on all ranks."""
        ranges: list[SendRange] = []
        for chunk in plan.chunks if self._open else ():
            sequence = chunk.sequence
            transfer = self._open.get(sequence.key)
            end = sequence.kv.num_computed + chunk.num_tokens
            if transfer is None or end <= transfer.num_left:
                continue
            if transfer.begin is None:
                transfer.group = sequence.kv.group
                problem = self._begin(transfer, kv)
            else:
                problem = "" if transfer.group == sequence.kv.group else _MOVED
            if problem:
                self._give_up(sequence.key, transfer, problem)
                continue
            first, size = transfer.num_left, kv.block_size  # cached tokens of the prompt are sent with the first step
            tables = [list(table[first // size : -(-end // size)]) for table in sequence.kv.tables]
            transfer_id, slot = transfer.hand_over.transfer_id, sequence.kv.state_slot
            begin = None if transfer.num_left else transfer.begin
            ranges.append(SendRange(transfer_id, first, end, tables, slot, begin, transfer.group))
            transfer.num_left = end
        return ranges

    def ended(self, key: int, *, prefill_done: bool) -> str:
        """Finish the transfer of a request that has ended. Return why its KV was not sent, or ""."""
        problem = self._problems.pop(key, "")
        transfer = self._open.pop(key, None)
        if transfer is None:
            return problem
        transfer_id = transfer.hand_over.transfer_id
        is_complete = prefill_done and transfer.num_left == len(transfer.tokens)
        self._end_others(EndSend(transfer_id, is_complete))
        problem = self.own.end(transfer_id, is_complete=is_complete)
        return "the prompt is not completely computed" if prefill_done and not is_complete else problem

    def close(self) -> None:
        self.own.close()

    def _begin(self, transfer: _OutgoingPrompt, kv: KvCache) -> str:
        """Announce the transfer, if rank 0 has a part of it. Return why that is not possible, or "".

        The announcement waits until the prompt is being computed, since the receiver reserves memory for it.
        """
        given, tokens = transfer.hand_over, transfer.tokens
        addresses = given.address.split(ADDRESS_SEPARATOR)
        begin = SendBegin(addresses, given.host, given.token, len(tokens), prompt_hash(tokens), given.ranks)
        transfer.begin = begin
        return self.own.begin(given.transfer_id, begin, kv) if transfer.group == self.own.group else ""

    def _give_up(self, key: int, transfer: _OutgoingPrompt, problem: str) -> None:
        """End a transfer that cannot continue. The request is still prefilled here, and its KV computed again."""
        self.own.log_not_sent(problem)
        self._problems[key] = problem
        del self._open[key]
        if transfer.num_left:
            self._end_others(EndSend(transfer.hand_over.transfer_id, is_complete=False))
            self.own.end(transfer.hand_over.transfer_id, is_complete=False)
