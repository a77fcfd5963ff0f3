"""Progress of a KV transfer over several ranks, as rank 0 sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from structlog.testing import capture_logs

from moiety_engine.kv_transfer.cache_shards import CacheShare
from moiety_engine.kv_transfer.rank_messages import EndSend, SendBegin, SendRange, TransferMessage
from moiety_engine.kv_transfer.rank_sender import RankSender
from moiety_engine.kv_transfer.rank_transfers import GroupTransferProgress, RankTransfers, sum_transfer_progress
from moiety_engine.kv_transfer.staging_buffer import ANNOUNCED_S, STALLED_S, Progress
from moiety_engine.model.batch import KvCache
from moiety_kernels.kv_store.caches import LayerCache
from moiety_wire.roles import KvRanks


class OtherRank:
    """The collectives of two ranks, with the other rank's progress."""

    def __init__(self) -> None:
        self.progress = Progress.COMING

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        other = SimpleNamespace(sum=lambda counts: counts)
        return own + torch.tensor(sum_transfer_progress(cast(Any, other), self.progress))


class Polls:
    """Rank 0's polls of a transfer of which its own part is there."""

    def __init__(self) -> None:
        self.now_s, self.other, self.sent = 100.0, OtherRank(), list[TransferMessage]()
        layout = SimpleNamespace(attention_ranks=2)
        ranks = SimpleNamespace(everyone=self.other, rank_position=SimpleNamespace(layout=layout))
        group = cast(Any, SimpleNamespace(ranks=ranks))
        self._transfers = GroupTransferProgress(group, self.sent.append, clock=lambda: self.now_s)

    def poll(self, progress: Progress, after_s: float = 0.0) -> Progress:
        self.now_s += after_s
        self.other.progress = progress
        return self._transfers.progress("a", b"hash")


@pytest.fixture
def polls() -> Polls:
    return Polls()


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


class RefusedSends:
    """A sender thread whose transfers the receiver refuses."""

    def begin(self, *_: object) -> str:
        return ""

    def end(self, *_: str) -> str:
        return "no room"

    def cancel(self, *_: str) -> None:
        """Cancel the refused transfer."""


def test_a_rank_logs_why_its_part_was_not_sent() -> None:
    parts = torch.zeros(2, 4, 4, 1, 8)
    kv = KvCache((LayerCache(parts[0], parts[1], None, None),), 4, 4)
    two = KvRanks(tp=2)
    sender = RankSender(cast(Any, RefusedSends()), CacheShare(two, 1, 1, (2,)))
    transfers = RankTransfers(cast(Any, None), sender, None, cast(Any, None))
    with capture_logs() as logs:
        one_address = SendBegin(["tcp://127.0.0.1:9"], "", "", 4, b"hash", two)
        assert transfers.sends([SendRange("a", 0, 4, [[0]], 0, -1, one_address)], kv) is None
        two_addresses = SendBegin(["tcp://127.0.0.1:9"] * 2, "", "", 4, b"hash", two)
        assert transfers.sends([SendRange("b", 0, 4, [[0]], 0, -1, two_addresses)], kv) is not None
        transfers.execute(EndSend("b", True))
    assert [(one["event"], one["rank"]) for one in logs] == [("kv_part_not_sent", 1)] * 2
    assert "1 KV addresses of an engine with --tp 2 and --pp 1" in logs[0]["reason"]
    assert logs[1]["reason"] == "no room"
