"""Group of a model's ranks after the rendezvous: process groups on one device mesh, rank 0's channel, heartbeats.

It owns the resources that are released at the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from moiety_engine.distribution.broadcast_channel import Channel, ControlChannel, DirectChannel
from moiety_engine.distribution.collectives import (
    DataParallelGroup,
    ExpertExchange,
    Pipeline,
    RankCollectives,
    Ranks,
    RowExchange,
    TransferGroup,
)
from moiety_engine.distribution.layout import Layout, RankPosition, without
from moiety_engine.distribution.rank_heartbeat import explaining
from moiety_engine.distribution.rendezvous import LONGEST_WAIT, ConnectedRanks, RankExclusion, connect_ranks, open_store
from moiety_engine.loopback import keep_collectives_on_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moiety_engine.distribution.rank_additions import RankAdditions
    from moiety_engine.distribution.rank_heartbeat import RankHeartbeat
    from moiety_engine.distribution.rank_processes import RankProcesses
    from moiety_engine.distribution.rendezvous_address import Rendezvous

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # control messages use the CPU network in both cases
LONGEST_TRANSFER = timedelta(minutes=2)  # of the weights of one move, after which the experts stay where they are


@dataclass(slots=True)
class RankGroup:
    """One rank's view of the group."""

    ranks: Ranks
    channel: ControlChannel
    heartbeat: RankHeartbeat
    store: Store  # rank 0's store serves the others; its keys are those of this attempt
    excluded: tuple[int, ...] = ()  # excluded ranks, by their original numbers
    children: RankProcesses | None = field(default=None)
    additions: RankAdditions | None = field(default=None)  # on rank 0, if it has started the others

    def close(self) -> None:
        """End the group normally; on rank 0, call it after the stop message was sent."""
        self.channel.flush()
        self.heartbeat.close()
        _destroy_groups()
        if self.children is not None:
            self.children.wait()

    def all_succeeded(self, succeeded: bool) -> bool:
        """Return whether the operation succeeded on every rank. All ranks must call this at the same point."""
        return not self.ranks.everyone.sum(torch.tensor([int(not succeeded)])).item()

    def waited_s(self) -> tuple[float, float]:
        """Return the seconds that rank 0 waited for the expert ranks, and the mean that these waited for attention.

        Only valid on rank 0. The values of the expert ranks are up to half a second old.
        """
        of_experts = self.heartbeat.waited_before_s + sum(self.heartbeat.waited_s.values())  # the others report 0
        return self.ranks.waited.seconds, of_experts / max(1, self.ranks.rank_position.layout.ffn_ranks)

    def sum_figures(self, own: dict[str, int]) -> dict[str, int]:
        """Return rank 0's load figures with those of the other ranks, which are up to half a second old, added."""
        total = Counter(own)
        for figures in list(self.heartbeat.figures.values()):
            total.update(figures)
        return dict(total)

    def abandon(self, reason: str, *, own: bool = False) -> None:
        """Leave the group because this rank cannot continue, and send the others the reason.

        `own`: the others may continue without it.
        """
        self.heartbeat.fail(reason, own=own)
        _destroy_groups()
        if self.children is not None:
            self.children.wait()


def join(
    layout: Layout,
    rendezvous: Rendezvous,
    *,
    settings: dict[str, str],
    checkpoint: str,
    device_type: str,
    timeout_s: float,
    store: Store | None = None,
    exclude_rank_after_s: float | None = None,
    gone: Callable[[], Mapping[int, str]] = lambda: {},
    note: Callable[[int], None] | None = None,
    has_ordered_sums: bool = False,
    steps_in_flight: int = 1,
    moves_experts: bool = False,
    drafts: bool = False,
) -> RankGroup:
    """Meet the other ranks and create the groups.

    `store` is the store that rank 0 has already opened. After `exclude_rank_after_s` seconds the group excludes the
    ranks that have not joined, if it can; the other ranks are then renumbered. See `connect_ranks` for `gone` and
    `note`, and RankCollectives for `has_ordered_sums`. With several `steps_in_flight` no rank waits for a later stage.
    `moves_experts` creates the group by which experts move, and `drafts` that of the experts of a draft model. A rank
    lost while the groups are created ends the process.
    Raises RanksError.
    """
    if rendezvous.is_local:
        keep_collectives_on_loopback()
    store = store or open_store(rendezvous, timeout_s)
    exclusion = None if exclude_rank_after_s is None else RankExclusion(layout, exclude_rank_after_s)
    connected = connect_ranks(
        rendezvous, store, settings, checkpoint, timeout_s=timeout_s, exclusion=exclusion, gone=gone, note=note
    )
    with connected.heartbeat.guarding(), explaining():
        return _rank_group_of(
            layout,
            rendezvous,
            store,
            connected,
            device_type,
            has_ordered_sums=has_ordered_sums,
            steps_in_flight=steps_in_flight,
            moves_experts=moves_experts,
            drafts=drafts,
        )


def _rank_group_of(
    layout: Layout,
    rendezvous: Rendezvous,
    store: Store,
    connected: ConnectedRanks,
    device_type: str,
    *,
    has_ordered_sums: bool,
    steps_in_flight: int,
    moves_experts: bool,
    drafts: bool,
) -> RankGroup:
    """Create the process groups; all ranks create the same ones."""
    heartbeat, excluded = connected.heartbeat, connected.excluded
    own_keys = keys_of_group(rendezvous, store)
    layout, rank = without(layout, excluded), rendezvous.rank - sum(one < rendezvous.rank for one in excluded)
    dist.init_process_group(
        BACKENDS[device_type],
        store=PrefixStore(f"torch/{rendezvous.attempt}", store),
        rank=rank,
        world_size=layout.num_ranks,
        timeout=LONGEST_WAIT,
    )
    mesh = DeviceMesh(
        device_type,
        torch.arange(layout.attention_ranks).view(layout.pp, layout.dp, layout.tp),
        mesh_dim_names=("pp", "dp", "tp"),
    )
    context_mesh: DeviceMesh | None = None
    if layout.dcp > 1:
        shards = torch.arange(layout.attention_ranks).view(-1, layout.dcp)
        context_mesh = DeviceMesh(device_type, shards, mesh_dim_names=("whole", "dcp"))
    everyone = dist.group.WORLD
    assert everyone is not None
    channel = Channel(everyone) if steps_in_flight == 1 else DirectChannel(everyone)
    rank_position = RankPosition(layout, rank)
    crossings = _crossings(rank_position)
    may_move = layout.ep > 1 or layout.ffn_ranks > 0  # expert ranks may be added
    transfers = TransferGroup(dist.new_group(timeout=LONGEST_TRANSFER)) if moves_experts and may_move else None
    stages = _stages(layout, device_type, drafts=drafts)
    if rank_position.expert_rank is not None:
        ranks = Ranks(rank_position, everyone=RankCollectives(everyone), crossings=crossings, transfers=transfers)
        heartbeat.report_waited(ranks.waited)
        return RankGroup(ranks, channel, heartbeat, own_keys, excluded)
    tensor = RankCollectives()
    if layout.tp > 1:
        tensor = RankCollectives(mesh.get_group("tp"), has_ordered_sums=has_ordered_sums)
    context = RankCollectives() if context_mesh is None else RankCollectives(context_mesh.get_group("dcp"))
    column = range(rank % layout.stage_size, layout.attention_ranks, layout.stage_size)
    returning = mesh.get_group("pp") if layout.pp > 1 else None
    pipeline = Pipeline(column, rank_position.pp_rank, returning, most_pending=steps_in_flight)
    exchange = None if stages is None else RowExchange(stages.get_group("stage"))
    across = _across(rank_position)
    ranks = Ranks(
        rank_position,
        tensor,
        pipeline,
        RankCollectives(everyone),
        across,
        None if layout.ffn_ranks else exchange,
        crossings,
        draft_experts=exchange,
        context=context,
        transfers=transfers,
        copies=RankCollectives(mesh.get_group("dp")) if layout.pcp > 1 else RankCollectives(),
    )
    return RankGroup(ranks, channel, heartbeat, own_keys, excluded)


def keys_of_group(rendezvous: Rendezvous, store: Store) -> PrefixStore:
    """Return the part of the store that the ranks of this start use while they run."""
    return PrefixStore(f"ranks/{rendezvous.attempt}", store)


def _destroy_groups() -> None:
    if dist.is_initialized():  # not on a rank that has joined a running group
        dist.destroy_process_group()


def _across(rank_position: RankPosition) -> DataParallelGroup:
    first = rank_position.rank - rank_position.dp_rank * rank_position.layout.tp
    return DataParallelGroup(
        [first + group * rank_position.layout.tp for group in range(rank_position.layout.dp)], rank_position.dp_rank
    )


def _stages(layout: Layout, device_type: str, *, drafts: bool) -> DeviceMesh | None:
    """Return the ranks with attention by stage, if those of a stage exchange rows for experts that they hold.

    With expert ranks, they hold the experts of a draft model or of MTP layers only. All ranks call it.
    """
    if layout.dp == 1 or (layout.ffn_ranks and not drafts):
        return None
    ranks = torch.arange(layout.attention_ranks).view(layout.pp, layout.stage_size)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("pp", "stage"))


def _crossings(rank_position: RankPosition) -> tuple[ExpertExchange, ...]:
    """Return the expert exchanges that this rank takes part in, by stage. All ranks create all groups together."""
    layout, found = rank_position.layout, []
    experts = range(layout.attention_ranks, layout.num_ranks)
    for stage in range(layout.pp) if layout.ffn_ranks else ():
        ranks = [*range(stage * layout.stage_size, (stage + 1) * layout.stage_size), *experts]
        there, back = dist.new_group(ranks), dist.new_group(ranks)
        if rank_position.rank in ranks:
            found.append(ExpertExchange(RowExchange(there), RowExchange(back), layout.stage_size))
    return tuple(found)
