"""Assembly of a loaded model from a configuration: on one rank, or a share on each of several ranks.

The caller of `assemble` is rank 0, or the only rank; the caller of `follow` is another rank, and executes rank 0's
commands until the group ends.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import psutil
import structlog
import torch

from moiety_engine.cache_setup import why_windows_are_kept
from moiety_engine.checkpoint import fingerprint
from moiety_engine.config import Speculate
from moiety_engine.disk.rank_disk import RankDiskCache
from moiety_engine.distribution.broadcast_channel import Channel
from moiety_engine.distribution.collectives import SINGLE_RANK_GROUPS, Ranks
from moiety_engine.distribution.layout import Layout, RankPosition, layout_of, leaving, with_expert_ranks
from moiety_engine.distribution.rank_additions import RankAdditions
from moiety_engine.distribution.rank_failure_log import RankFailureLog
from moiety_engine.distribution.rank_group import RankGroup, join, keys_of_group
from moiety_engine.distribution.rank_heartbeat import Loaded, explaining
from moiety_engine.distribution.rank_processes import RankProcesses
from moiety_engine.distribution.rank_scaling import ScalingFailed, ScalingPreparation, ranks_of
from moiety_engine.distribution.rendezvous import connect_ranks, open_store
from moiety_engine.distribution.rendezvous_address import (
    Rendezvous,
    require_hosts_apart,
    require_private_ranks,
    require_ranks,
)
from moiety_engine.errors import CheckpointError, EngineError, InvalidConfig, OutOfMemory, RanksError
from moiety_engine.kv_transfer.connector import rank_transfers_of
from moiety_engine.loopback import keep_collectives_on_loopback
from moiety_engine.model.loading import WeightShard, load_options, load_share
from moiety_engine.mtp_and_draft_model.loading import load_draft_models
from moiety_engine.runner.checkpoint_weights import CheckpointWeights
from moiety_engine.runner.expert_worker import ExpertWorker
from moiety_engine.runner.overlap import steps_overlap
from moiety_engine.runner.worker import Worker, WorkerBase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch._C._distributed_c10d import TCPStore

    from moiety_engine.config import EngineConfig
    from moiety_engine.model.transformer import Transformer
    from moiety_engine.runner.checkpoint_weights import PartLoader

# settings that may differ between ranks
_SINGLE_RANK_FEATURES = (
    "model",
    "draft_model",
    "name",
    "num_threads",
    "join_timeout_s",
    "allow_unauthenticated_ranks",
    "exclude_rank_after_s",
    "rank_failure_log",
    "exclude_rank_after_failures",
    "rank_failures_within_s",
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Assembled:
    """A model on its ranks. `rank_group` is None where there is only one rank."""

    model: Transformer
    draft_models: tuple[Transformer, ...]  # a draft model, or the MTP layers
    rank_group: RankGroup | None
    local_ranks: int  # ranks on this host that have a KV cache
    load_part: PartLoader  # of the model, once more


def assemble(
    config: EngineConfig, rendezvous: Rendezvous | None, progress: Callable[[int, int], None] | None = None
) -> Assembled:
    """Load the model on all ranks and return it.

    `rendezvous` is the launcher's; without one, the other ranks are started here. Raises EngineError, which the
    other ranks receive.
    """
    layout = layout_of(config)
    if rendezvous is None and layout.num_ranks == 1:
        own = Rendezvous(0, 1)
        model = _load(config, own, SINGLE_RANK_GROUPS, progress).transformer()
        return Assembled(model, _load_draft_models(config, model, progress), None, 1, _part_loader(config, own))
    rank_group, rendezvous = _spawn(config) if rendezvous is None else (_lead(config, rendezvous), rendezvous)
    heartbeat = rank_group.heartbeat

    def watched(done: int, total: int) -> None:
        heartbeat.check()
        if progress is not None:
            progress(done, total)

    with abandon_on_error(rank_group):
        model = _load(config, rendezvous, rank_group.ranks, watched).transformer()
        draft_models = _load_draft_models(config, model, watched)
        heartbeat.wait_loaded()
    heartbeat.guard()
    if rank_group.excluded:
        _log_excluded_ranks(rank_group, layout, model)
    local_ranks = min(rendezvous.local_num_ranks, rank_group.ranks.rank_position.layout.attention_ranks)
    return Assembled(model, draft_models, rank_group, local_ranks, _part_loader(config, rendezvous))


def follow(config: EngineConfig, rendezvous: Rendezvous) -> None:
    """Run as a rank other than the first, until the group ends regularly.

    Raises EngineError, which the other ranks receive.
    """
    if rendezvous.generation:
        _follow_running_group(config, rendezvous)
        return
    rank_group = _join(config, rendezvous)
    rank_group.heartbeat.guard()
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 drains, and then all ranks end
        signal.signal(number, signal.SIG_IGN)
    with abandon_on_error(rank_group):
        share = _load(config, rendezvous, rank_group.ranks, None)
        worker = _worker_of(share, rank_group, config, rendezvous)
        rank_group.heartbeat.send(Loaded())
        if share.options.expert_cache is not None:
            rank_group.heartbeat.report_figures(share.options.expert_cache.figures)
        del share  # the worker frees weights that it replaces
        with contextlib.closing(worker), explaining():
            worker.run()
    rank_group.close()


def _follow_running_group(config: EngineConfig, rendezvous: Rendezvous) -> None:
    """Join a running group as an expert rank, and run until the group ends or removes this rank."""
    if rendezvous.is_local:
        keep_collectives_on_loopback()
    base = open_store(rendezvous, config.join_timeout_s)
    position = RankPosition(with_expert_ranks(layout_of(config), rendezvous.num_expert_ranks), rendezvous.rank)
    settings = settings_of(config, torch.device("cpu"))
    connected = connect_ranks(
        rendezvous, base, settings, fingerprint(Path(config.model)), timeout_s=config.join_timeout_s
    )
    heartbeat = connected.heartbeat
    heartbeat.guard()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    shares: list[WeightShard] = []
    store = keys_of_group(rendezvous, base)
    preparation = ScalingPreparation(
        store,
        position.layout,
        position.rank,
        rendezvous.generation,
        lambda: shares.append(_load(config, rendezvous, Ranks(position), None)),
    )
    try:
        groups = preparation.result()
    except ScalingFailed as exc:
        heartbeat.fail(str(exc))
        raise
    ranks = ranks_of(groups, position.rank, moves_experts=config.rebalanced_every_s > 0)
    heartbeat.report_waited(ranks.waited)
    rank_group = RankGroup(ranks, Channel(groups.everyone), heartbeat, store)
    with abandon_on_error(rank_group):
        worker = _worker_of(shares.pop(), rank_group, config, rendezvous)
        with contextlib.closing(worker), explaining():
            rank_group.all_succeeded(True)  # the others have switched to the groups with this rank
            worker.run()
    rank_group.close()


def _load_part(
    config: EngineConfig,
    rendezvous: Rendezvous,
    checkpoint: str,
    position: RankPosition,
    on_progress: Callable[[], None] = lambda: None,
) -> WeightShard:
    """Load the part of a position once more, on a rank that serves, without changing its number of threads.

    `checkpoint`: fingerprint at the start. Raises CheckpointError if the files have changed since.
    """
    own = replace(rendezvous, local_num_ranks=1)
    share = _load(config, own, Ranks(position), lambda _done, _total: on_progress())
    if fingerprint(Path(config.model)) != checkpoint:
        raise CheckpointError(
            f"the checkpoint {config.model} was changed since this rank has loaded it: restart the engine"
        )
    return share


def _part_loader(config: EngineConfig, rendezvous: Rendezvous) -> PartLoader:
    return partial(_load_part, config, rendezvous, fingerprint(Path(config.model)))


def _worker_of(share: WeightShard, rank_group: RankGroup, config: EngineConfig, rendezvous: Rendezvous) -> WorkerBase:
    checkpoint = CheckpointWeights(config, _part_loader(config, rendezvous), load_draft_models)
    if rank_group.ranks.rank_position.expert_rank is not None:
        experts = share.experts(rank_group.ranks)
        return ExpertWorker(experts, rank_group, checkpoint, overlaps=steps_overlap(experts, config))
    model = share.transformer()
    disk = RankDiskCache(config, model, rank_group) if config.disk_cache else None
    draft_models = load_draft_models(config, model)
    transfers = rank_transfers_of(config.transfer, model, rank_group)
    return Worker(
        model,
        rank_group,
        draft_models,
        overlaps=steps_overlap(model, config),
        disk=disk,
        transfers=transfers,
        steps_in_flight=config.steps_in_flight,
        checkpoint=checkpoint,
    )


@contextlib.contextmanager
def abandon_on_error(rank_group: RankGroup | None) -> Iterator[None]:
    """Abandon the group on an error within, and send the reason to the other ranks."""
    try:
        yield
    except EngineError as exc:
        if rank_group is None:
            raise
        own = isinstance(exc, CheckpointError | OutOfMemory)  # all other errors occur on all ranks
        if not rank_group.excluded or isinstance(exc, RanksError):
            rank_group.abandon(str(exc), own=own)
            raise
        parts = "its part" if len(rank_group.excluded) == 1 else "their parts"
        reason = f"{exc} (the group runs without {_named(rank_group.excluded)} and holds {parts} of the model)"
        rank_group.abandon(reason, own=own)
        raise RanksError(reason) from exc


def _log_excluded_ranks(rank_group: RankGroup, before: Layout, model: Transformer) -> None:
    """Log the effect of running without the excluded ranks."""
    now, costs = rank_group.ranks.rank_position.layout, {}
    if model.experts is not None and now.excluded:
        num_experts = model.experts.num_placed
        costs = {"experts_a_rank": now.slots_each(num_experts), "experts_a_rank_before": before.slots_each(num_experts)}
    log.warning(
        "ranks_excluded",
        excluded=rank_group.excluded,
        groups=now.dp,
        groups_before=before.dp,
        **costs,
        advice="start these ranks again, then restart the group; it includes them",
    )


def _named(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _spawn(config: EngineConfig) -> tuple[RankGroup, Rendezvous]:
    """Start the other ranks on this host and join them."""
    layout = layout_of(config)
    own = Rendezvous(0, layout.num_ranks, local_num_ranks=layout.num_ranks)
    _device(config, own)
    losses, given_up = losses_of(config, layout, own)
    store = open_store(own, config.join_timeout_s)
    places = [replace(own, rank=rank, local_rank=rank, port=store.port) for rank in range(1, layout.num_ranks)]
    children = RankProcesses(
        {place.rank: msgspec.json.encode((config, place)) for place in places if place.rank not in given_up}
    )
    try:
        rank_group = _join(config, own, store=store, losses=losses, gone=lambda: given_up | children.ended())
    except BaseException:
        children.kill()
        raise
    rank_group.children = children
    device, checkpoint = torch.device(_device(config, own)), fingerprint(Path(config.model))
    rank_group.additions = RankAdditions(config, own, store, children, settings_of(config, device), checkpoint)
    return rank_group, own


def _lead(config: EngineConfig, rendezvous: Rendezvous) -> RankGroup:
    """Join the ranks that a launcher has started."""
    losses, given_up = losses_of(config, layout_of(config), rendezvous)
    return _join(config, rendezvous, losses=losses, gone=lambda: given_up)


def _join(
    config: EngineConfig,
    rendezvous: Rendezvous,
    store: TCPStore | None = None,
    losses: RankFailureLog | None = None,
    gone: Callable[[], Mapping[int, str]] = lambda: {},
) -> RankGroup:
    layout = layout_of(config)
    require_ranks(layout, rendezvous)
    require_hosts_apart(config.exclude_rank_after_s, rendezvous)
    require_private_ranks(rendezvous, allowed=config.allow_unauthenticated_ranks)
    device = torch.device(_device(config, rendezvous))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return join(
        layout,
        rendezvous,
        settings=settings_of(config, device),
        checkpoint=fingerprint(Path(config.model)),
        device_type=device.type,
        timeout_s=config.join_timeout_s,
        store=store,
        exclude_rank_after_s=config.exclude_rank_after_s,
        gone=gone,
        note=None if losses is None else losses.note,
        has_ordered_sums=config.batch_invariant,
        steps_in_flight=config.steps_in_flight,
        moves_experts=config.rebalanced_every_s > 0,
        drafts=config.speculate in (Speculate.DRAFT, Speculate.MTP),
    )


def settings_of(config: EngineConfig, device: torch.device) -> dict[str, str]:
    """Return the settings and versions that must be equal on all ranks."""
    named = {name: str(getattr(config, name)) for name in config.__struct_fields__ if name not in _SINGLE_RANK_FEATURES}
    versions = {"torch": str(torch.__version__), "numpy": np.__version__}
    if config.draft_model:
        versions["draft_model"] = fingerprint(Path(config.draft_model))
    if device.type == "cpu":
        from moiety_kernels.cpu.gemm import arithmetic  # noqa: PLC0415  # a GPU's engine never loads the compiler

        versions["products"] = arithmetic()
    return named | versions


def losses_of(
    config: EngineConfig, layout: Layout, rendezvous: Rendezvous
) -> tuple[RankFailureLog | None, dict[int, str]]:
    """Return rank 0's rank-failure log, and the ranks that it excludes, with the reason.

    The ranks with the most losses are excluded, as long as the others can run without them.
    """
    if not config.rank_failure_log:
        return None, {}
    within_s, given_up = config.losses_within_s, dict[int, str]()
    sizes = {name: getattr(layout, name) for name in ("tp", "dp", "ep", "pp", "ffn_ranks", "dcp")}
    group = f"{config.name} at {rendezvous.host}, {', '.join(f'{name} {n}' for name, n in sizes.items())}"
    losses = RankFailureLog(Path(config.rank_failure_log), group, within_s=within_s)
    often = losses.lost_often(config.excluded_after_losses)
    for rank, times in sorted(often.items(), key=lambda one: -one[1]):
        if not 0 < rank < layout.num_ranks:
            continue
        try:
            leaving(layout, (*given_up, rank))
        except InvalidConfig as exc:
            log.warning(
                "rank_not_excluded",
                rank=rank,
                lost_times=times,
                reason=str(exc),
                advice="repair the rank's host: the group cannot run without this rank",
            )
            continue
        given_up[rank] = (
            f"rank {rank} failed {times} times in {within_s:g} s according to {config.rank_failure_log}, "
            "so the group runs without it: after repair, empty that file or wait until its entries "
            "expire, and restart the group"
        )
    return losses, given_up


def _load(
    config: EngineConfig, rendezvous: Rendezvous, ranks: Ranks, progress: Callable[[int, int], None] | None
) -> WeightShard:
    num_threads = config.num_threads
    if num_threads is None and rendezvous.local_num_ranks > 1:
        num_threads = max(1, (psutil.cpu_count(logical=False) or 1) // rendezvous.local_num_ranks)
    options = load_options(config, _device(config, rendezvous), progress)
    options |= {
        "kv_dtype": config.kv_dtype,
        "batch_invariant": config.batch_invariant,
        "num_threads": num_threads,
        "ranks": ranks,
        "offload": config.offload,
        "local_ranks": rendezvous.local_num_ranks,
        "keeps_hidden": config.speculate is Speculate.MTP,
        "frees_windows": not why_windows_are_kept(config),
    }
    return load_share(Path(config.model), **options)


def _load_draft_models(
    config: EngineConfig, model: Transformer, progress: Callable[[int, int], None] | None
) -> tuple[Transformer, ...]:
    try:
        return load_draft_models(config, model, progress)
    except BaseException:
        model.close()
        raise


def _device(config: EngineConfig, rendezvous: Rendezvous) -> str:
    """Return this rank's device. Raises InvalidConfig where a host has fewer GPUs than ranks."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    if device == "cpu" or rendezvous.num_ranks == 1:
        return device
    if rendezvous.local_num_ranks > torch.cuda.device_count():
        raise InvalidConfig(
            f"{rendezvous.local_num_ranks} ranks on this host need one GPU each, but the host has "
            f"{torch.cuda.device_count()}: use fewer ranks, start some on other hosts with torchrun, or "
            "use --device cpu"
        )
    return f"cuda:{rendezvous.local_rank}"
