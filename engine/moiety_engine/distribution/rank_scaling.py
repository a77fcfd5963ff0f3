"""Process groups of another number of expert ranks, which are created in the background while the old ones are used.

All ranks of the next layout meet in the store of the rendezvous, each with the news whether it is prepared, create the
groups, and report whether they have them. Groups of a running process cannot be enlarged, and torch's default group
cannot be replaced without ending it, so these groups are not registered with torch.distributed. On processors only.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from moiety_engine.distribution.collectives import (
    ExpertExchange,
    RankCollectives,
    Ranks,
    RowExchange,
    TransferGroup,
)
from moiety_engine.distribution.layout import RankPosition
from moiety_engine.distribution.rank_group import LONGEST_TRANSFER
from moiety_engine.distribution.rendezvous import LONGEST_WAIT
from moiety_engine.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moiety_engine.distribution.layout import Layout
    from moiety_engine.distribution.rank_group import RankGroup

LONGEST_CREATION = timedelta(minutes=1)  # of the groups, whose ranks may be lost meanwhile
_POLL_S = 0.1
_CREATED = "created/"  # beginning of the store keys of the ranks that have created the groups, or could not


class ScalingFailed(EngineError):
    """The number of expert ranks could not be changed; the ranks of before go on."""


@dataclass(frozen=True, slots=True)
class NextGroups:
    """Groups of one rank in the next layout.

    `crossings`: (to experts, back) of its stage, or of all stages. `exchange`: ranks of its stage with other tokens
    that have the experts, if there are no expert ranks.
    """

    layout: Layout
    everyone: ProcessGroup
    crossings: tuple[tuple[ProcessGroup, ProcessGroup], ...]
    transfers: ProcessGroup
    exchange: ProcessGroup | None = None


def adopt_groups(rank_group: RankGroup, groups: NextGroups) -> None:
    """Let a rank with attention use the next groups and layout. All ranks call it after the same control message."""
    ranks = rank_group.ranks
    ranks.rank_position = RankPosition(groups.layout, ranks.rank_position.rank)
    ranks.everyone.replace_group(groups.everyone)
    if len(ranks.crossings) != len(groups.crossings):  # experts move between these ranks and expert ranks
        ranks.crossings = _crossings_of(groups)
    for crossing, (there, back) in zip(ranks.crossings, groups.crossings, strict=True):
        crossing.there.replace_group(there)
        crossing.back.replace_group(back)
    ranks.experts = None if groups.exchange is None else RowExchange(groups.exchange)
    if ranks.transfers is not None:
        ranks.transfers.replace_group(groups.transfers)
    rank_group.channel.replace_group(groups.everyone)


def ranks_of(groups: NextGroups, rank: int, *, moves_experts: bool) -> Ranks:
    """Return the groups of an expert rank. `rank` is that in the next layout."""
    everyone, crossings = RankCollectives(groups.everyone), _crossings_of(groups)
    transfers = TransferGroup(groups.transfers) if moves_experts else None
    return Ranks(RankPosition(groups.layout, rank), everyone=everyone, crossings=crossings, transfers=transfers)


def _crossings_of(groups: NextGroups) -> tuple[ExpertExchange, ...]:
    attention = groups.layout.stage_size
    return tuple(ExpertExchange(RowExchange(there), RowExchange(back), attention) for there, back in groups.crossings)


class ScalingPreparation:
    """Preparation of one rank for the next layout, in a thread of its own.

    The thread ends when the groups exist, when a rank is not prepared or rank 0 has cancelled, and at the latest
    `timeout` after it has begun to create the groups, if a rank is lost then. What `prepare` has made is not kept.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        rank: int,
        generation: int,
        prepare: Callable[[], None] = lambda: None,
        *,
        timeout: timedelta = LONGEST_CREATION,
    ) -> None:
        """Begin. `rank` is that in the next layout, `generation` counts the changes of the layout.

        `prepare` is called first. If it raises an exception, all ranks are told.
        """
        cloneable: Any = store  # torch's stubs lack `clone`
        self._keys = PrefixStore(f"scaling/{generation}", cloneable.clone())
        # a connection of its own: the thread may wait for a lost rank, and holds the lock of its connection then
        self._cancelling = PrefixStore(f"scaling/{generation}", cloneable.clone())
        self._layout, self._rank, self._timeout = layout, rank, timeout
        self._prepare: Callable[[], None] | None = prepare
        self._ended: Future[NextGroups] = Future()
        threading.Thread(target=self._run, name="expert-scaling", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._ended.done()

    def result(self) -> NextGroups:
        """Wait for the groups, which on rank 0 then exist on all ranks. Raises ScalingFailed with the reason."""
        return self._ended.result()

    def cancel(self, reason: str) -> None:
        """Let the preparation fail on all ranks that still wait for others. Called on rank 0."""
        self._cancelling.set("cancelled", reason)

    def _run(self) -> None:
        try:
            self._meet("", self._problem())
            self._ended.set_result(self._create())
        except ScalingFailed as exc:
            self._ended.set_exception(exc)
        except RuntimeError as exc:  # of the store
            self._ended.set_exception(ScalingFailed(f"rank {self._rank} lost the connection to rank 0: {exc}"))

    def _problem(self) -> str:
        """Prepare this rank, and return why that has failed; "" if it has not."""
        prepare, self._prepare = self._prepare, None  # the thread may wait on while what it has made is discarded
        assert prepare is not None, "a rank is prepared once"
        try:
            prepare()
        except Exception as exc:  # without an answer of this thread all ranks would wait
            return f"rank {self._rank}: {str(exc) or type(exc).__name__}"
        return ""

    def _create(self) -> NextGroups:
        """Create the groups, and on rank 0 wait until all ranks have done so. Raises ScalingFailed."""
        try:
            groups = _create_groups(self._keys, self._layout, self._rank, self._timeout)
            dist.all_reduce(torch.zeros(1), group=groups.everyone)  # returns once all have all groups
            _set_timeouts(groups)
        except RuntimeError as exc:  # of the store or of gloo
            problem = f"rank {self._rank} lost the connection to another one: {exc}"
            self._keys.set(f"{_CREATED}{self._rank}", problem)
            raise ScalingFailed(problem) from exc
        if self._rank == 0:  # it decides for all ranks, one of which may have lost another one at the very end
            self._meet(_CREATED, "")
        else:
            self._keys.set(f"{_CREATED}{self._rank}", "")
        return groups

    def _meet(self, prefix: str, problem: str) -> None:
        """Wait until all ranks have come so far. Raises ScalingFailed if one has failed, or if rank 0 has cancelled."""
        self._keys.set(f"{prefix}{self._rank}", problem)
        names = [f"{prefix}{rank}" for rank in range(self._layout.num_ranks)]
        while not self._keys.check(names):
            if problem or self._keys.check(["cancelled"]):
                raise ScalingFailed(problem or self._keys.get("cancelled").decode())
            time.sleep(_POLL_S)
        if problems := [text for name in names if (text := self._keys.get(name).decode())]:
            raise ScalingFailed("; ".join(problems))


def _create_groups(store: Store, layout: Layout, rank: int, timeout: timedelta) -> NextGroups:
    """Create all groups of this rank; all ranks create them in the same order. Operations end after `timeout`."""
    world = range(layout.num_ranks)
    everyone, transfers = (_group(store, name, world, rank, timeout) for name in ("everyone", "transfers"))
    crossings = []
    for stage in range(layout.pp) if layout.ffn_ranks else ():
        attention = range(stage * layout.stage_size, (stage + 1) * layout.stage_size)
        ranks = [*attention, *range(layout.attention_ranks, layout.num_ranks)]
        if rank in ranks:
            there, back = (_group(store, f"{name}/{stage}", ranks, rank, timeout) for name in ("there", "back"))
            crossings.append((there, back))
    exchange = None
    if layout.dp > 1 and not layout.ffn_ranks:
        stage = rank // layout.stage_size
        attention = range(stage * layout.stage_size, (stage + 1) * layout.stage_size)
        exchange = _group(store, f"exchange/{stage}", attention, rank, timeout)
    return NextGroups(layout, everyone, tuple(crossings), transfers, exchange)


def _set_timeouts(groups: NextGroups) -> None:
    """Give the groups the timeouts of those that ranks create at their start."""
    further = () if groups.exchange is None else (groups.exchange,)
    for group in (groups.everyone, *further, *(one for pair in groups.crossings for one in pair)):
        group.set_timeout(LONGEST_WAIT)
    groups.transfers.set_timeout(LONGEST_TRANSFER)


def _group(store: Store, name: str, ranks: Sequence[int], rank: int, timeout: timedelta) -> ProcessGroup:
    """Create a gloo group of these ranks, in order, that is not registered with torch.distributed."""
    own, keys = ranks.index(rank), PrefixStore(name, store)
    backend = ProcessGroupGloo(keys, own, len(ranks), timeout)
    group = ProcessGroup(keys, own, len(ranks))
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    return group
