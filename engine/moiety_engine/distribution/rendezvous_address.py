"""Address at which the ranks of a model meet.

A launcher (torchrun or DeepSpeed's) starts all ranks and sets the address in the environment; otherwise rank 0 starts
the others itself. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moiety_engine.errors import InvalidConfig
from moiety_engine.loopback import LOOPBACK, is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moiety_engine.distribution.layout import Layout


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """One rank's view of the rendezvous. With `store_runs` the launcher runs the store, so rank 0 does not start it."""

    rank: int
    num_ranks: int
    local_rank: int = 0
    local_num_ranks: int = 1  # on this host
    host: str = "127.0.0.1"
    port: int = 0
    store_runs: bool = False
    attempt: int = 0  # number of restarts by the launcher
    generation: int = 0  # with expert ranks that join a running group: which change of their number; 0: at the start
    num_expert_ranks: int = 0  # of this generation

    @property
    def is_local(self) -> bool:
        """Return whether all ranks run on this host."""
        return self.local_num_ranks >= self.num_ranks or is_loopback(self.host)

    @property
    def own_host(self) -> str:
        """The address that this process listens on for the other ranks."""
        return LOOPBACK if self.is_local and not is_loopback(self.host) else self.host

    @property
    def store_host(self) -> str:
        """The host of the store: the launcher's address if the launcher runs it."""
        return self.host if self.store_runs else self.own_host


def rendezvous_from(environ: Mapping[str, str]) -> Rendezvous | None:
    """Return the rendezvous that a launcher set; None without a launcher, or if it started one process only.

    Raises InvalidConfig.
    """
    if environ.get("WORLD_SIZE", "1") == "1":
        return None
    try:
        return Rendezvous(
            rank=int(environ["RANK"]),
            num_ranks=int(environ["WORLD_SIZE"]),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            local_num_ranks=int(environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or "1"),
            host=environ["MASTER_ADDR"],
            port=int(environ["MASTER_PORT"]),
            store_runs=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
    except (KeyError, ValueError) as exc:
        raise InvalidConfig(
            f"WORLD_SIZE is set to {environ['WORLD_SIZE']}, but RANK, MASTER_ADDR and MASTER_PORT are not "
            f"all set ({exc}): start with torchrun or deepspeed, or unset WORLD_SIZE"
        ) from exc


def require_ranks(layout: Layout, rendezvous: Rendezvous) -> None:
    """Raise InvalidConfig if the launcher started another number of ranks than the layout has."""
    if layout.num_ranks != rendezvous.num_ranks:
        further = f", with --ffn-ranks {layout.ffn_ranks}," if layout.ffn_ranks else ""
        raise InvalidConfig(
            f"--pp {layout.pp} × {layout.groups_option} {layout.dp} × --tp {layout.tp}{further} needs "
            f"{layout.num_ranks} ranks, but {rendezvous.num_ranks} were started: change the options or the "
            "launcher's number of processes"
        )


def require_hosts_apart(exclude_rank_after_s: float | None, rendezvous: Rendezvous) -> None:
    """Raise InvalidConfig if ranks may be excluded but the launcher starts no rank before all hosts have joined."""
    if exclude_rank_after_s is not None and rendezvous.store_runs:
        raise InvalidConfig(
            "--exclude-rank-after-s is not available under torchrun, which starts no rank before all "
            "hosts have joined: start the ranks of each host with deepspeed --no_ssh, or with RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, or leave it out"
        )


def require_private_ranks(rendezvous: Rendezvous, *, allowed: bool) -> None:
    """Raise InvalidConfig if ranks talk to other hosts and their network is not declared private.

    Neither torch's collectives nor its store authenticate their peers.
    """
    if not rendezvous.is_local and not allowed:
        raise InvalidConfig(
            f"the rendezvous address {rendezvous.host} is reachable from other machines, and links between "
            "ranks are not authenticated: a machine that reaches their ports can read and change what "
            "they compute; run all ranks on one host, or set --allow-unauthenticated-ranks on a private "
            "network"
        )
