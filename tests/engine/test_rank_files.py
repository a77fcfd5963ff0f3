"""Files of two ranks: when an unsuccessful read removes a file, and when it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from moiety_engine.disk.folder import DiskFolder, ReadOutcome
from moiety_engine.disk.index import DiskIndex, Stored
from moiety_engine.disk.rank_disk import RankDiskCache, _LocalRows
from moiety_engine.disk.rank_files import GroupFolder
from moiety_engine.disk.restoring import Restorer
from moiety_engine.disk.rows import RankRow, RankRows, host_rows
from moiety_engine.distribution.rank_requests import RankAnswers, RankRequests, RequestTimedOut
from moiety_engine.model.batch import KvCache
from moiety_engine.runner.kv_swap import HostKv
from moiety_kernels.kv_store.caches import LayerCache

from .disk_tiers import make_submit

KEY = b"k" * 32
HASH = b"h" * 32
ROWS_ID = 0


class ImpatientRequests(RankRequests):
    """Requests that wait for no answer."""

    def answer(self, rank: int, number: int, timeout_s: float = 0.0) -> bytes:
        return super().answer(rank, number, timeout_s)


class TwoRanks:
    """Rank 0's view of the files of two ranks, and the part of the second rank, without a model."""

    def __init__(self, folder: Path, requests: type[RankRequests] = RankRequests) -> None:
        self.store: Any = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        parts = torch.arange(2 * 4 * 4 * 8, dtype=torch.float32).view(2, 4, 4, 1, 8)
        self.kv = KvCache((LayerCache(parts[0], parts[1], None, None),), 4, 4)
        self.block_bytes = HostKv.bytes_of_a_block(self.kv)
        own = DiskFolder(folder / "first", b"i" * 32, self.block_bytes)
        self.requests = requests(self.store, KEY)
        self.files = GroupFolder(own, folder, own.identity, self.block_bytes, [1], self.requests)
        self.paths = [own.path, folder / "second" / own.identity.hex()]
        self.own_rows = host_rows(self.kv, 4)
        self.other = RankDiskCache(cast(Any, None), cast(Any, None), cast(Any, SimpleNamespace()))
        self.other._folder = DiskFolder(folder / "second", own.identity, self.block_bytes)
        self.wake_other()
        self.other._answers = RankAnswers(self.store, KEY, 1, self.other._handle)

    def wake_other(self) -> None:
        self.other._rows = {ROWS_ID: _LocalRows(host_rows(self.kv, 4))}

    def row(self, num_copies: int) -> RankRow:
        """Return a row that the second rank uses once its rows have been copied so many times."""
        return RankRow(ROWS_ID, num_copies, 0, self.own_rows.view(0))

    def write(self) -> Stored:
        return self.files.write(b"o" * 16, [HASH], [self.row(0)])

    def read(self, num_copies: int) -> ReadOutcome:
        return self.files.read(self.stored.name, [(HASH, self.row(num_copies))])

    @property
    def num_files(self) -> list[int]:
        return [len(list(path.glob("*.kv"))) for path in self.paths]

    def close(self) -> None:
        self.requests.close()
        self.other.close()
        self.files.close()

    stored: Stored


def close_requests(ranks: TwoRanks) -> None:
    ranks.requests.close()


def release_rows(ranks: TwoRanks) -> None:
    ranks.other.release()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[TwoRanks]:
    found = TwoRanks(tmp_path)
    found.stored = found.write()
    assert found.num_files == [1, 1]
    yield found
    found.close()


@pytest.fixture
def late_ranks(tmp_path: Path) -> Iterator[TwoRanks]:
    found = TwoRanks(tmp_path, ImpatientRequests)
    yield found
    found.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


@pytest.mark.parametrize("ends", [close_requests, release_rows])
def test_a_read_that_shutdown_or_sleep_interrupts_leaves_the_files(
    ranks: TwoRanks, pool: ThreadPoolExecutor, ends: Callable[[TwoRanks], None]
) -> None:
    reading = pool.submit(ranks.read, num_copies=1)  # the second rank waits for a copy that does not come
    assert not reading.done()
    ends(ranks)
    assert reading.result(60) is ReadOutcome.NOT_AVAILABLE
    assert ranks.num_files == [1, 1]


def test_files_are_read_again_after_sleep(ranks: TwoRanks) -> None:
    ranks.other.release()
    assert ranks.read(num_copies=0) is ReadOutcome.NOT_AVAILABLE
    ranks.wake_other()
    assert ranks.read(num_copies=0) is ReadOutcome.DONE


def test_a_file_that_is_bad_on_one_rank_is_removed_on_all(ranks: TwoRanks) -> None:
    path = ranks.paths[1] / ranks.stored.name
    path.write_bytes(path.read_bytes()[:-100])
    assert ranks.read(num_copies=0) is ReadOutcome.FILE_IS_BAD
    assert ranks.num_files == [0, 0]


def test_rows_that_a_late_rank_may_still_fill_are_not_used_again(late_ranks: TwoRanks) -> None:
    ranks = late_ranks
    with pytest.raises(RequestTimedOut):
        ranks.files.write(b"o" * 16, [HASH], [ranks.row(1)])
    index = DiskIndex(1 << 30)
    index.add(Stored("a.kv", ranks.block_bytes, (HASH,), b"o" * 16, 0.0, None))
    restorer = Restorer(ranks.files, index, 1)
    rows = RankRows(ranks.own_rows, 4, ranks.block_bytes, ROWS_ID, lambda *_: None)
    rows.copy_in([], [])  # which the second rank has not done yet
    assert restorer.add_request(make_submit(1), None, [HASH], 1e9, ranks.block_bytes, is_known=True)
    restorer.read(rows)
    restorer._readers.shutdown()
    assert not list(restorer.take_read())
    assert rows.num_free == rows.count - 1
    assert index.find(HASH) is not None
    assert [submit.key for submit, _ in restorer.take_ready()] == [1]
