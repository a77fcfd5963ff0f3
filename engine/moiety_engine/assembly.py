"""From a configuration to a model that is loaded: on one rank, or each rank's share on each of several.

Whoever calls `assemble` is rank 0, or alone; whoever calls `follow` is another rank, and does what rank 0 says until
the group ends.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import psutil
import structlog
import torch

from moiety_engine.checkpoint import fingerprint
from moiety_engine.config import Speculate
from moiety_engine.distribution.crew import join
from moiety_engine.distribution.group import ALONE
from moiety_engine.distribution.joining import open_store
from moiety_engine.distribution.layout import Layout, layout_of, leaving
from moiety_engine.distribution.lifeline import Loaded, explaining
from moiety_engine.distribution.losses import Losses
from moiety_engine.distribution.meeting import Meeting, require_hosts_apart, require_private_ranks, require_ranks
from moiety_engine.distribution.spawning import Children
from moiety_engine.errors import CheckpointError, EngineError, InvalidConfig, OutOfMemory, RanksError
from moiety_engine.model.loading import Share, load_share
from moiety_engine.runner.follower import ExpertFollower, Follower, Obeying
from moiety_engine.runner.overlap import steps_overlap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch._C._distributed_c10d import TCPStore

    from moiety_engine.config import EngineConfig
    from moiety_engine.distribution.crew import Crew
    from moiety_engine.distribution.group import Ranks
    from moiety_engine.model.transformer import Transformer

# settings in which ranks may differ
_OF_ONE_RANK = (
    "model",
    "name",
    "num_threads",
    "join_timeout_s",
    "allow_unauthenticated_ranks",
    "mask_after_s",
    "rank_losses",
    "mask_after_losses",
    "rank_losses_within_s",
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Assembled:
    """A model on its ranks. `crew` is None where there is one only."""

    model: Transformer
    crew: Crew | None
    local_ranks: int  # on this host, those with a cache


def assemble(
    config: EngineConfig, meeting: Meeting | None, progress: Callable[[int, int], None] | None = None
) -> Assembled:
    """The model, loaded on all ranks. `meeting`: what a launcher said; without one, other ranks are started here.
    Raises EngineError, which the other ranks are told."""
    layout = layout_of(config)
    if meeting is None and layout.num_ranks == 1:
        return Assembled(_load(config, Meeting(0, 1), ALONE, progress).transformer(), None, 1)
    crew, meeting = _spawn(config) if meeting is None else (_lead(config, meeting), meeting)
    lifeline = crew.lifeline

    def watched(done: int, total: int) -> None:
        lifeline.check()
        if progress is not None:
            progress(done, total)

    with telling(crew):
        model = _load(config, meeting, crew.ranks, watched).transformer()
        lifeline.wait_loaded()
    lifeline.guard()
    if crew.masked:
        _tell_of_masked(crew, layout, model)
    return Assembled(model, crew, min(meeting.local_num_ranks, crew.ranks.seat.layout.attention_ranks))


def follow(config: EngineConfig, meeting: Meeting) -> None:
    """Be another rank than the first. Returns when the group has ended in order. Raises EngineError, which the others
    are told."""
    crew = _join(config, meeting)
    crew.lifeline.guard()
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 drains, and then all end
        signal.signal(number, signal.SIG_IGN)
    with telling(crew):
        share = _load(config, meeting, crew.ranks, None)
        follower = _follower(share, crew, config)
        crew.lifeline.tell(Loaded())
        with explaining():
            follower.run()
    crew.close()


def _follower(share: Share, crew: Crew, config: EngineConfig) -> Obeying:
    if crew.ranks.seat.expert_rank is not None:
        experts = share.experts()
        return ExpertFollower(experts, crew, overlaps=steps_overlap(experts, config))
    model = share.transformer()
    return Follower(model, crew, overlaps=steps_overlap(model, config))


@contextlib.contextmanager
def telling(crew: Crew | None) -> Iterator[None]:
    """What is raised within ends the group, and the others are told why."""
    try:
        yield
    except EngineError as exc:
        if crew is None:
            raise
        own = isinstance(exc, CheckpointError | OutOfMemory)  # what else is wrong is so on all ranks
        if not crew.masked or isinstance(exc, RanksError):
            crew.abandon(str(exc), own=own)
            raise
        parts = "its part" if len(crew.masked) == 1 else "their parts"
        reason = f"{exc} (the group does without {_named(crew.masked)}, and has {parts} of the model)"
        crew.abandon(reason, own=own)
        raise RanksError(reason) from exc


def _tell_of_masked(crew: Crew, before: Layout, model: Transformer) -> None:
    """What it costs to do without them."""
    now, costs = crew.ranks.seat.layout, {}
    if model.experts is not None and now.masked:
        num_experts = model.experts.num_experts
        costs = {"experts_a_rank": now.slots_each(num_experts), "experts_a_rank_before": before.slots_each(num_experts)}
    log.warning(
        "ranks_masked",
        masked=crew.masked,
        groups=now.dp,
        groups_before=before.dp,
        **costs,
        advice="start them again, and then the group, which takes them in",
    )


def _named(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _spawn(config: EngineConfig) -> tuple[Crew, Meeting]:
    """Start the other ranks on this host, and meet them."""
    layout = layout_of(config)
    own = Meeting(0, layout.num_ranks, local_num_ranks=layout.num_ranks)
    _device(config, own)
    losses, given_up = losses_of(config, layout, own)
    store = open_store(own, config.join_timeout_s)
    places = [replace(own, rank=rank, local_rank=rank, port=store.port) for rank in range(1, layout.num_ranks)]
    children = Children(
        {place.rank: msgspec.json.encode((config, place)) for place in places if place.rank not in given_up}
    )
    try:
        crew = _join(config, own, store=store, losses=losses, gone=lambda: given_up | children.ended())
    except BaseException:
        children.kill()
        raise
    crew.children = children
    return crew, own


def _lead(config: EngineConfig, meeting: Meeting) -> Crew:
    """Meet those that a launcher has started."""
    losses, given_up = losses_of(config, layout_of(config), meeting)
    return _join(config, meeting, losses=losses, gone=lambda: given_up)


def _join(
    config: EngineConfig,
    meeting: Meeting,
    store: TCPStore | None = None,
    losses: Losses | None = None,
    gone: Callable[[], Mapping[int, str]] = lambda: {},
) -> Crew:
    layout = layout_of(config)
    require_ranks(layout, meeting)
    require_hosts_apart(config.mask_after_s, meeting)
    require_private_ranks(meeting, allowed=config.allow_unauthenticated_ranks)
    named = {name: str(getattr(config, name)) for name in config.__struct_fields__ if name not in _OF_ONE_RANK}
    device = torch.device(_device(config, meeting))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    versions = {"torch": str(torch.__version__), "numpy": np.__version__}
    if device.type == "cpu":
        from moiety_kernels.cpu.gemm import arithmetic  # noqa: PLC0415  # a GPU's engine never loads the compiler

        versions["products"] = arithmetic()
    return join(
        layout,
        meeting,
        settings=named | versions,
        checkpoint=fingerprint(Path(config.model)),
        device_type=device.type,
        timeout_s=config.join_timeout_s,
        store=store,
        mask_after_s=config.mask_after_s,
        gone=gone,
        note=None if losses is None else losses.note,
    )


def losses_of(config: EngineConfig, layout: Layout, meeting: Meeting) -> tuple[Losses | None, dict[int, str]]:
    """Rank 0's file of them, and the ranks that are not to take part, by it, with the reason: those that were lost
    most often, as long as the others can do without."""
    if not config.rank_losses:
        return None, {}
    within_s, given_up = config.losses_within_s, dict[int, str]()
    sizes = {name: getattr(layout, name) for name in ("tp", "dp", "ep", "pp", "expert_ranks")}
    group = f"{config.name} at {meeting.host}, {', '.join(f'{name} {n}' for name, n in sizes.items())}"
    losses = Losses(Path(config.rank_losses), group, within_s=within_s)
    often = losses.lost_often(config.masked_after_losses)
    for rank, times in sorted(often.items(), key=lambda one: -one[1]):
        if not 0 < rank < layout.num_ranks:
            continue
        try:
            leaving(layout, (*given_up, rank))
        except InvalidConfig as exc:
            log.warning("rank_not_masked", rank=rank, lost_times=times, reason=str(exc))
            continue
        given_up[rank] = (
            f"rank {rank} was lost {times} times in {within_s:g} s, by {config.rank_losses}: the group does "
            "without it; once it is mended, empty that file, or let the time pass, and start the group again"
        )
    return losses, given_up


def _load(config: EngineConfig, meeting: Meeting, ranks: Ranks, progress: Callable[[int, int], None] | None) -> Share:
    num_threads = config.num_threads
    if num_threads is None and meeting.local_num_ranks > 1:
        num_threads = max(1, (psutil.cpu_count(logical=False) or 1) // meeting.local_num_ranks)
    return load_share(
        Path(config.model),
        device=_device(config, meeting),
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        quantization=config.quantization,
        moe_kernel=config.moe_kernel,
        batch_invariant=config.batch_invariant,
        num_threads=num_threads,
        load_format=config.load_format,
        ranks=ranks,
        offload=config.offload,
        progress=progress,
        keeps_hidden=config.speculate is Speculate.MTP,
        max_context_tokens=config.max_context_tokens,
    )


def _device(config: EngineConfig, meeting: Meeting) -> str:
    """Raises InvalidConfig where a host has fewer GPUs than ranks."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    if device == "cpu" or meeting.num_ranks == 1:
        return device
    if meeting.local_num_ranks > torch.cuda.device_count():
        raise InvalidConfig(
            f"{meeting.local_num_ranks} ranks on this host need as many GPUs, and it has {torch.cuda.device_count()}: "
            "choose fewer ranks, start some on other hosts with torchrun, or take --device cpu"
        )
    return f"cuda:{meeting.local_rank}"
