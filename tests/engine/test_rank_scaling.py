"""Preparation of another number of expert ranks when a new rank is killed: no thread waits on, and nothing is kept."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from tests.conftest import wait_for
from torch.distributed import TCPStore

from moiety_engine.distribution.layout import Layout, with_expert_ranks
from moiety_engine.distribution.rank_group import LONGEST_TRANSFER
from moiety_engine.distribution.rank_scaling import ScalingFailed, ScalingPreparation
from moiety_engine.distribution.rendezvous import LONGEST_WAIT

NEXT = with_expert_ranks(Layout(ffn_ranks=1), 2)  # ranks 0 and 1 run, rank 2 is new
PREPARED = """
import sys, time
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, False, wait_for_workers=False)
PrefixStore("scaling/1", store).set("2", "")  # it is prepared
print("prepared", flush=True)
time.sleep(600)
"""


class Share:
    """A share of the experts."""

    is_loaded = False

    def load(self) -> None:
        self.is_loaded = True


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.fixture
def new_rank(store: TCPStore) -> Iterator[subprocess.Popen[str]]:
    """The process of the new rank, which never creates groups."""
    started = subprocess.Popen([sys.executable, "-c", PREPARED, str(store.port)], stdout=subprocess.PIPE, text=True)
    yield started
    started.kill()
    started.wait()
    assert started.stdout is not None
    started.stdout.close()


def test_preparations_end_when_a_new_rank_is_killed_while_groups_are_created(
    store: TCPStore, new_rank: subprocess.Popen[str]
) -> None:
    before, limit = set(threading.enumerate()), timedelta(seconds=3)
    preparations = [ScalingPreparation(store, NEXT, rank, 1, timeout=limit) for rank in range(2)]
    assert new_rank.stdout is not None and new_rank.stdout.readline() == "prepared\n"
    new_rank.kill()
    for preparation in preparations:
        with pytest.raises(ScalingFailed, match="lost the connection to another one"):
            preparation.result()
    wait_for(lambda: not set(threading.enumerate()) - before, "the threads of the preparations end")


def test_a_rank_that_discards_its_share_of_experts_frees_it_although_it_waits_for_another_rank(
    store: TCPStore, new_rank: subprocess.Popen[str]
) -> None:
    share = Share()
    kept = weakref.ref(share)
    preparations = [ScalingPreparation(store, NEXT, 0, 1), ScalingPreparation(store, NEXT, 1, 1, share.load)]
    assert new_rank.stdout is not None and new_rank.stdout.readline() == "prepared\n"
    wait_for(lambda one=share: one.is_loaded, "the share is loaded")
    del share
    wait_for(lambda: kept() is None, "the share is freed")
    assert not any(one.is_done for one in preparations)


def test_a_change_that_rank_0_cancels_ends_on_ranks_that_still_wait(store: TCPStore) -> None:
    preparations = [ScalingPreparation(store, NEXT, rank, 1) for rank in range(2)]
    preparations[0].cancel("the engine went to sleep")
    for preparation in preparations:
        with pytest.raises(ScalingFailed, match="went to sleep"):
            preparation.result()


def test_groups_are_created_within_a_time_but_wait_as_those_of_a_start(store: TCPStore) -> None:
    preparations = [ScalingPreparation(store, NEXT, rank, 1, timeout=timedelta(seconds=50)) for rank in range(3)]
    for groups in [one.result() for one in preparations]:
        pairs = [one for pair in groups.crossings for one in pair]
        assert {_timeout(one) for one in (groups.everyone, *pairs)} == {LONGEST_WAIT}
        assert _timeout(groups.transfers) == LONGEST_TRANSFER


def _timeout(group: Any) -> timedelta:
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found
