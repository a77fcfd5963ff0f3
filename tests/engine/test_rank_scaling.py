"""Preparation of another number of expert ranks when a new rank is killed: no thread waits on, and nothing is kept."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.conftest import wait_for
from torch._C._distributed_c10d import TCPStore

from moiety_engine.config import EngineConfig, OffloadConfig
from moiety_engine.distribution.layout import Layout, RankPosition, with_expert_ranks
from moiety_engine.distribution.rank_group import LONGEST_TRANSFER
from moiety_engine.distribution.rank_scaling import ScalingFailed, ScalingPreparation
from moiety_engine.distribution.rendezvous import LONGEST_WAIT
from moiety_engine.runner.expert_messages import ExpertMessage, PrepareExpertRanks, SwitchExpertRanks
from moiety_engine.runner.expert_scaling import ExpertScaling
from moiety_wire.engine_choices import Offload

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

    def load(self) -> None:
        """Load nothing."""


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
    del share
    wait_for(lambda: kept() is None, "the share is freed once it is loaded")
    assert not any(one.is_done for one in preparations)


def test_a_change_that_rank_0_cancels_ends_on_ranks_that_still_wait(store: TCPStore) -> None:
    preparations = [ScalingPreparation(store, NEXT, rank, 1) for rank in range(2)]
    preparations[0].cancel("the engine went to sleep")
    for preparation in preparations:
        with pytest.raises(ScalingFailed, match="went to sleep"):
            preparation.result()


class HangingRank:
    """Heartbeats, processes and messages of rank 0 beside a new rank that joins and then hangs."""

    def __init__(self) -> None:
        self.has_joined = self.hangs = False
        self.sent: list[ExpertMessage] = []
        self.killed: list[int] = []
        self.processes = self

    def watch_candidates(self, lines: dict[int, Any]) -> None:
        self.has_joined = True

    def lost_candidates(self, ranks: range) -> list[int]:
        return list(ranks) if self.hangs else []

    def admit(self, *_: Any) -> dict[int, Any]:
        return {}

    def dismiss(self, ranks: range, *, kill: bool = False) -> None:
        self.killed += ranks if kill else ()

    def send(self, message: ExpertMessage) -> None:
        self.sent.append(message)

    def start(self, *_: Any) -> None:
        """Start the process of the new rank."""

    def ended(self) -> dict[int, str]:
        return {}

    def scaling(
        self, store: TCPStore, num_ranks: int = 1, num_experts: int = 8, device: str = "cpu", **settings: Any
    ) -> ExpertScaling:
        """Return the owner of the number of expert ranks, which is `num_ranks`."""
        layout = Layout(ffn_ranks=num_ranks, ep=num_ranks)
        group = SimpleNamespace(store=store, heartbeat=self, excluded=(), additions=self)
        model = SimpleNamespace(
            ranks=SimpleNamespace(rank_position=RankPosition(layout, 0)),
            adapters=SimpleNamespace(num_changes=0, num_slots=0),
            experts=SimpleNamespace(num_placed=num_experts),
            device=torch.device(device),
            is_offloaded=False,
            require_part=lambda position: None,
        )
        controls = SimpleNamespace(rank_group=group, send=self.send, steps_in_flight=1)
        config = EngineConfig(model="folder", name="name", **settings)
        return ExpertScaling(cast(Any, model), cast(Any, controls), config, lambda: None)


def test_a_new_rank_that_hangs_ends_the_change_and_the_ranks_of_before_go_on(store: TCPStore) -> None:
    rank = HangingRank()
    scaling = rank.scaling(store)
    scaling.begin(2)
    wait_for(lambda: rank.has_joined, "the new rank joins")
    assert not scaling.update() and scaling.is_under_way
    rank.hangs = True
    wait_for(lambda: not scaling.update() and not scaling.is_under_way, "the change ends")
    assert "rank 2 sends no heartbeat any more" in scaling.problem
    assert rank.sent == [PrepareExpertRanks(2, 1), SwitchExpertRanks(commits=False)] and rank.killed == [2]
    assert (scaling.requested_ranks, scaling.failed_scalings_total, scaling.scalings_total) == (1, 1, 0)


FIXED: list[tuple[dict[str, Any], str]] = [
    ({"batch_invariant": True}, "--batch-invariant"),
    ({"offload": OffloadConfig(what=Offload.EXPERTS)}, "--offload experts"),
    ({"device": "cuda"}, "expert ranks on GPUs"),
    ({"num_experts": 1}, "more than the model's experts"),
]


@pytest.mark.parametrize(("settings", "words"), FIXED, ids=str)
def test_the_load_says_that_the_number_cannot_change_where_every_request_is_refused(
    store: TCPStore, settings: dict[str, Any], words: str
) -> None:
    scaling = HangingRank().scaling(store, **settings)
    assert not scaling.metrics()["can_change_expert_ranks"]
    scaling.begin(2)
    assert words in scaling.problem and not scaling.is_under_way


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_the_load_says_that_the_number_can_change_where_one_more_or_one_less_is_possible(
    store: TCPStore, num_ranks: int
) -> None:
    assert HangingRank().scaling(store, num_ranks=num_ranks).metrics()["can_change_expert_ranks"]


def test_groups_are_created_within_a_time_but_wait_as_those_of_a_start(store: TCPStore) -> None:
    preparations = [ScalingPreparation(store, NEXT, rank, 1, timeout=timedelta(seconds=50)) for rank in range(3)]
    for groups in [one.result() for one in preparations]:
        pairs = [one for pair in groups.crossings for one in pair]
        assert {_timeout(one) for one in (groups.everyone, *pairs)} == {LONGEST_WAIT}
        assert _timeout(groups.transfers) == LONGEST_TRANSFER


def _timeout(group: Any) -> timedelta:
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found
