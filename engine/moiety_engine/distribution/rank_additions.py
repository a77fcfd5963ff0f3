"""Start of further ranks on rank 0's host while the group runs, and their admission."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from moiety_engine.distribution.rendezvous import admit_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._C._distributed_c10d import TCPStore

    from moiety_engine.config import EngineConfig
    from moiety_engine.distribution.rank_heartbeat import RankConnection
    from moiety_engine.distribution.rank_processes import RankProcesses
    from moiety_engine.distribution.rendezvous_address import Rendezvous


@dataclass(frozen=True, slots=True)
class RankAdditions:
    """Processes of a group that rank 0 has started itself. `rendezvous` is that of rank 0, `port` that of the store."""

    config: EngineConfig
    rendezvous: Rendezvous
    store: TCPStore
    processes: RankProcesses
    settings: dict[str, str]
    checkpoint: str

    def start(self, ranks: range, num_expert_ranks: int, generation: int) -> None:
        """Start the processes of new expert ranks."""
        if ranks:
            places = [replace(self._next(ranks, num_expert_ranks, generation), rank=rank) for rank in ranks]
            self.processes.add({one.rank: msgspec.json.encode((self.config, one)) for one in places})

    def admit(self, ranks: range, num_expert_ranks: int, generation: int) -> dict[int, RankConnection]:
        """Wait until these ranks have joined, and return their connections. Raises RanksError."""
        if not ranks:
            return {}
        store: Any = self.store  # torch's stubs lack `clone`
        return admit_ranks(
            self._next(ranks, num_expert_ranks, generation),
            store.clone(),
            ranks,
            self.settings,
            self.checkpoint,
            timeout_s=self.config.join_timeout_s,
            gone=self.processes.ended,
        )

    def dismiss(self, ranks: Iterable[int], *, kill: bool = False) -> None:
        """Expect the processes of these ranks to end, or kill them."""
        self.processes.dismiss(ranks, kill=kill)

    def _next(self, ranks: range, num_expert_ranks: int, generation: int) -> Rendezvous:
        """Return the rendezvous of a generation, as of rank 0."""
        return replace(
            self.rendezvous,
            num_ranks=ranks.stop,
            local_num_ranks=ranks.stop,
            port=self.store.port,
            generation=generation,
            num_expert_ranks=num_expert_ranks,
        )
