"""The ledgers of all groups of ranks that attend to sequences of their own: who is in which, and who should be.

A sequence belongs to a group as long as it holds blocks there. One that holds none joins the group that has the longest
beginning of it in its prefix cache, unless that one has much more to do than another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from moiety_engine.cache.host import Copies, HostTier
from moiety_engine.scheduling.kv_ledger import KvLedger
from moiety_engine.scheduling.plan import KvLoad
from moiety_engine.sequence import Sequence as Request

_NEAR = 1.25  # times the least load: so much may a group have to do without being passed over


@dataclass(frozen=True, slots=True)
class GroupCandidate:
    """What speaks for a group: the tokens of its running requests, those of the newcomer that it has cached, and how
    many blocks would still be free; negative where too few are."""

    group: int
    load_tokens: int
    cached_tokens: int
    blocks_left: int


def best_group(candidates: Sequence[GroupCandidate], num_tokens: int) -> int:
    """Where a request of so many tokens should go."""
    fitting = [one for one in candidates if one.blocks_left >= 0] or candidates
    near = min(one.load_tokens for one in fitting) * _NEAR + num_tokens
    return min(
        (one for one in fitting if one.load_tokens <= near),
        key=lambda one: (-one.cached_tokens, one.load_tokens, -one.blocks_left, one.group),
    ).group


class KvGroups:
    """One ledger a group, all of one size."""

    def __init__(self, ledgers: Sequence[KvLedger]) -> None:
        self._ledgers = tuple(ledgers)
        self.first = self._ledgers[0]
        self.count = len(self._ledgers)

    def __iter__(self) -> Iterator[KvLedger]:
        return iter(self._ledgers)

    def of(self, request: Request) -> KvLedger:
        """Of the group that it is in."""
        return self._ledgers[request.group]

    @property
    def num_blocks(self) -> int:
        """Of all groups, as the next two are."""
        return sum(kv.pool.num_blocks for kv in self._ledgers)

    @property
    def num_used(self) -> int:
        return sum(kv.pool.num_used for kv in self._ledgers)

    @property
    def hosts(self) -> list[HostTier]:
        """Their tiers in host memory, if they have any."""
        return [kv.host for kv in self._ledgers if kv.host is not None]

    def num_cached(self, request: Request) -> int:
        """How many of its tokens the prefix cache of any one group holds."""
        return max([len(kv.find_prefix(request)) for kv in self._ledgers]) * self.first.block_size

    def choose(self, request: Request, running: Iterable[Request], full: set[int]) -> None:
        """Put a request that holds no blocks into a group, not one of the `full` if there are others."""
        load_tokens = [0] * self.count
        for other in running:
            load_tokens[other.group] += len(other.tokens)
        num_tokens = len(request.tokens)
        candidates = []
        for group, kv in enumerate(self._ledgers):
            if group not in full:
                hits = kv.find_prefix(request)
                blocks_left = kv.pool.num_free - kv.num_blocks_to_start(hits, num_tokens)
                candidates.append(GroupCandidate(group, load_tokens[group], len(hits) * kv.block_size, blocks_left))
        request.group = best_group(candidates, num_tokens)

    def take_copies(self) -> Copies:
        """What all groups must have copied, once a plan. Of each group, blocks are numbered after those of the groups
        before it."""
        if self.count == 1:
            return self.first.take_copies()
        outs: list[tuple[int, int]] = []
        ins: list[tuple[int, int]] = []
        for group, kv in enumerate(self._ledgers):
            copies, device = kv.take_copies(), group * kv.pool.num_blocks
            host = 0 if kv.host is None else group * kv.host.num_blocks
            outs += [(block + device, to + host) for block, to in copies.outs]
            ins += [(source + host, block + device) for source, block in copies.ins]
        return Copies(outs, ins)

    def take_landings(self) -> list[KvLoad]:
        """What must land from other engines, once a plan, after the copies; nothing where there are several groups."""
        return self.first.take_landings()

    def forget_tenants(self, marks: frozenset[bytes]) -> int:
        """Nothing of theirs is cached any more; how many blocks that were."""
        return sum(kv.forget_tenants(marks) for kv in self._ledgers)

    def forget(self) -> None:
        """All caches' contents are lost. No sequence holds any."""
        for kv in self._ledgers:
            kv.forget()
