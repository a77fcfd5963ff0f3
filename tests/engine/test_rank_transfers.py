"""Progress of a KV transfer over several ranks, as rank 0 sees it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from structlog.testing import capture_logs

from moiety_engine.distribution.layout import Layout
from moiety_engine.kv_transfer.cache_shards import CacheShare
from moiety_engine.kv_transfer.kv_sender import KvSender
from moiety_engine.kv_transfer.rank_messages import EndSend, SendBegin, SendRange, TransferMessage
from moiety_engine.kv_transfer.rank_sender import RankSender
from moiety_engine.kv_transfer.rank_transfers import GroupTransferProgress, RankTransfers, sum_transfer_progress
from moiety_engine.kv_transfer.staging_buffer import ANNOUNCED_S, STALLED_S, Progress
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.batch import KvCache
from moiety_engine.scheduling.plan import Chunk, Plan
from moiety_engine.sequence import Sequence
from moiety_kernels.kv_store.caches import LayerCache
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling
from moiety_wire.roles import KvHandoff, KvRanks, KvTransferTimes, transfer_group


class OtherRank:
    """The collectives of two ranks, with the other rank's progress."""

    def __init__(self) -> None:
        self.progress = Progress.COMING
        self.times: KvTransferTimes | None = None

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        given: list[torch.Tensor] = []

        def take(numbers: torch.Tensor) -> torch.Tensor:
            given.append(numbers)
            return numbers

        sum_transfer_progress(cast(Any, SimpleNamespace(sum=take)), self.progress, self.times)
        return own + given[0]


class Polls:
    """Rank 0's polls of a transfer of which its own part is there."""

    def __init__(self, layout: Layout) -> None:
        self.now_s, self.other, self.sent = 100.0, OtherRank(), list[TransferMessage]()
        ranks = SimpleNamespace(everyone=self.other, copies=None, rank_position=SimpleNamespace(layout=layout))
        group = cast(Any, SimpleNamespace(ranks=ranks))
        self.transfers = GroupTransferProgress(group, self.sent.append, clock=lambda: self.now_s)

    def poll(self, progress: Progress, after_s: float = 0.0, transfer_id: str = "a") -> Progress:
        self.now_s += after_s
        self.other.progress = progress
        return self.transfers.progress(transfer_id, b"hash")


@pytest.fixture
def polls() -> Polls:
    return Polls(Layout(tp=2))


def test_a_part_that_is_there_counts_however_late_it_is_polled(polls: Polls) -> None:
    assert polls.poll(Progress.COMING) is Progress.COMING
    assert polls.poll(Progress.THERE, after_s=STALLED_S + 1) is Progress.THERE


def test_a_part_that_still_receives_chunks_is_not_lost(polls: Polls) -> None:
    assert polls.poll(Progress.COMING) is Progress.COMING
    assert polls.poll(Progress.COMING, after_s=10 * STALLED_S) is Progress.COMING
    assert polls.poll(Progress.LOST, after_s=1) is Progress.LOST


def test_a_part_that_is_not_announced_in_time_is_lost(polls: Polls) -> None:
    assert polls.poll(Progress.UNKNOWN) is Progress.COMING
    assert polls.poll(Progress.UNKNOWN, after_s=ANNOUNCED_S - 1) is Progress.COMING
    assert polls.poll(Progress.UNKNOWN, after_s=2) is Progress.LOST


def test_a_transfer_to_a_group_without_rank_0_is_there_when_its_ranks_have_it() -> None:
    polls = Polls(Layout(dp=2))
    transfer_id = next(name for name in "abcdefgh" if transfer_group(name, 2) == 1)
    assert not polls.transfers.has_rank_0(transfer_id)
    assert polls.poll(Progress.COMING, 0.0, transfer_id) is Progress.COMING
    assert polls.transfers.arrival(transfer_id) is None
    polls.other.times = KvTransferTimes(5, 6, 7, 8, "memory")
    assert polls.poll(Progress.THERE, 1.0, transfer_id) is Progress.THERE
    assert polls.transfers.arrival(transfer_id) == polls.other.times
    polls.transfers.drop(transfer_id)
    assert polls.transfers.arrival(transfer_id) is None


def test_transfers_are_divided_evenly_among_the_groups() -> None:
    counts = Counter(transfer_group(f"{number:032x}", 4) for number in range(4000))
    assert sorted(counts) == [0, 1, 2, 3] and min(counts.values()) > 900


class Sends:
    """A rank's sender of group 0 that notes what it is asked for."""

    group = 0

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self, *_: object) -> str:
        self.calls.append("begin")
        return ""

    def end(self, _: str, *, is_complete: bool) -> str:
        self.calls.append(f"end {is_complete}")
        return ""

    def log_not_sent(self, problem: str) -> None:
        self.calls.append(problem)


def test_a_prompt_that_another_group_continues_is_not_sent() -> None:
    sends, ended = Sends(), list[EndSend]()
    kv_sender = KvSender(cast(Any, sends), ended.append)
    hand_over = KvHandoff("a", "tcp://127.0.0.1:9")
    submit = CoreSubmit(1, "t", STANDARD, [5] * 12, Sampling(), 8, 0, [], 8, b"s", 0, hand_over=hand_over)
    kv_sender.add_request(submit)
    sequence = Sequence(submit, order=0, seed=0)
    kv = cast(Any, SimpleNamespace(block_size=4))

    def ranges(num_computed: int, group: int) -> list[SendRange]:
        sequence.kv.fill_tables([0, 1, 2], 1)
        sequence.kv.num_computed, sequence.kv.group = num_computed, group
        return kv_sender.of(Plan([Chunk(sequence, 4, samples=False)], 0, 4, []), kv)

    assert [(one.first, one.end, one.group) for one in ranges(0, 1)] == [(0, 4, 1)]
    assert not sends.calls, "rank 0 has no part of it"
    assert not ranges(4, 0)
    assert sends.calls[-1] == "end False" and ended == [EndSend("a", False)]
    assert "another group of ranks" in kv_sender.ended(1, prefill_done=True)


class RefusedSends:
    """A sender thread whose transfers the receiver refuses."""

    def begin(self, *_: object) -> str:
        return ""

    def end(self, *_: str) -> str:
        return "no room"

    def cancel(self, *_: str) -> None:
        """Cancel the refused transfer."""


def test_ranks_of_all_groups_agree_whether_a_step_sends_kv() -> None:
    parts = torch.zeros(2, 4, 4, 1, 8)
    kv = KvCache((LayerCache(parts[0], parts[1], None, None),), 4, 4)
    ranks = KvRanks(groups=2)
    senders = [RankSender(cast(Any, RefusedSends()), CacheShare(ranks, rank, 0, (1,)), group=rank) for rank in range(2)]
    begin = SendBegin(["tcp://127.0.0.1:9"] * 2, "", "", 4, b"hash", ranks)
    of_first = [SendRange("a", 0, 4, [[0]], -1, begin, group=0)]
    sends = [sender.sends(of_first, kv) for sender in senders]
    assert all(one is not None for one in sends), "a rank without a part would choose other capacities of experts"
    assert [sender.sends([], kv) for sender in senders] == [None, None]
    of_other = sends[1]
    assert of_other is not None
    of_other(0)  # the rank of the other group has nothing to put on its sender thread


def test_a_rank_logs_why_its_part_was_not_sent() -> None:
    parts = torch.zeros(2, 4, 4, 1, 8)
    kv = KvCache((LayerCache(parts[0], parts[1], None, None),), 4, 4)
    two = KvRanks(tp=2)
    sender = RankSender(cast(Any, RefusedSends()), CacheShare(two, 1, 1, (2,)))
    transfers = RankTransfers(cast(Any, None), sender, None, cast(Any, None))
    with capture_logs() as logs:
        one_address = SendBegin(["tcp://127.0.0.1:9"], "", "", 4, b"hash", two)
        assert transfers.sends([SendRange("a", 0, 4, [[0]], -1, one_address)], kv) is not None
        two_addresses = SendBegin(["tcp://127.0.0.1:9"] * 2, "", "", 4, b"hash", two)
        assert transfers.sends([SendRange("b", 0, 4, [[0]], -1, two_addresses)], kv) is not None
        transfers.execute(EndSend("b", True))
    assert [(one["event"], one["rank"]) for one in logs] == [("kv_part_not_sent", 1)] * 2
    assert "1 KV addresses of an engine with --tp 2, --pp 1 and 1 groups" in logs[0]["reason"]
    assert logs[1]["reason"] == "no room"
