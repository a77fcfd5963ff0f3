"""KV ledgers of all rank groups (DP attention), and the assignment of sequences to groups.

A sequence belongs to a group as long as it holds blocks there. A sequence without blocks joins the group whose prefix
cache holds the longest prefix of it, unless that group has a much higher load than another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from moiety_engine.cache.content_table import ContentTable
from moiety_engine.cache.host import Copies
from moiety_engine.cache.prefix_change_log import PrefixChangeLog
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.plan import KvLoad
from moiety_engine.sequence import Sequence as Request

_NEAR = 1.25  # times the lowest load: groups up to this load stay eligible


@dataclass(frozen=True, slots=True)
class GroupCandidate:
    """Properties of a rank group as a target for a request.

    `load_tokens` counts the tokens of its running requests, `cached_tokens` the cached tokens of the new request.
    `blocks_left` is the number of free blocks after its start; negative if too few are free.
    """

    group: int
    load_tokens: int
    cached_tokens: int
    blocks_left: int


def best_group(candidates: Sequence[GroupCandidate], num_tokens: int) -> int:
    """Return the group for a request of `num_tokens` tokens."""
    fitting = [one for one in candidates if one.blocks_left >= 0] or candidates
    near = min(one.load_tokens for one in fitting) * _NEAR + num_tokens
    return min(
        (one for one in fitting if one.load_tokens <= near),
        key=lambda one: (-one.cached_tokens, one.load_tokens, -one.blocks_left, one.group),
    ).group


class KvGroups:
    """KV ledgers of all rank groups, one per group, all of the same size."""

    def __init__(self, ledgers: Sequence[KvLedger]) -> None:
        self.ledgers = tuple(ledgers)  # by group
        self.first = self.ledgers[0]
        self.count = len(self.ledgers)
        self.has_states = any(kv.states is not None for kv in self.ledgers)
        self.has_host = any(kv.host is not None for kv in self.ledgers)

    def __iter__(self) -> Iterator[KvLedger]:
        return iter(self.ledgers)

    def of(self, request: Request) -> KvLedger:
        """Return the ledger of the request's group."""
        return self.ledgers[request.kv.group]

    def record_prefix_changes(self) -> PrefixChangeLog | None:
        """Record from now on which blocks the caches of all groups store and evict, on the device and in host memory.

        Call it while nothing is cached. Return None for models with recurrent states, whose blocks alone are no hit.
        """
        if self.has_states:
            return None
        contents = ContentTable()
        for kv in self.ledgers:
            kv.pool.share_contents(contents)
            if kv.host is not None:
                kv.host.pool.share_contents(contents)
        return PrefixChangeLog(contents)

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(kv.pool.num_blocks for kv in self.ledgers)

    @property
    def num_used(self) -> int:
        return sum(kv.pool.num_used for kv in self.ledgers)

    def num_cached(self, request: Request) -> int:
        """Return the largest number of the request's tokens in any single group's prefix cache."""
        return max([len(kv.find_prefix(request)) for kv in self.ledgers]) * self.first.block_size

    def choose(self, request: Request, running: Iterable[Request], full: set[int]) -> None:
        """Assign a request without blocks to a group, not to one in `full` if there are others.

        A request stays in the group that has received its KV from another engine.
        """
        if request.kv.num_transferred_tokens:
            return
        load_tokens = [0] * self.count
        for other in running:
            load_tokens[other.kv.group] += len(other.tokens)
        num_tokens = len(request.tokens)
        candidates = []
        for group, kv in enumerate(self.ledgers):
            if group not in full:
                hits = kv.find_prefix(request)
                blocks_left = kv.pool.num_free - kv.num_blocks_to_start(hits, num_tokens)
                candidates.append(GroupCandidate(group, load_tokens[group], len(hits) * kv.block_size, blocks_left))
        request.kv.group = best_group(candidates, num_tokens)

    @property
    def has_kv_loads(self) -> bool:
        """True if KV loads from other engines are queued."""
        return bool(self.first.kv_loads) if self.count == 1 else any(kv.kv_loads for kv in self.ledgers)

    def count_evicted(self) -> None:
        """Record what the newest plan has evicted; no plan needs it, so that it can follow the launch."""
        for kv in self.ledgers:
            kv.pool.contents.count_removed()

    def take_copies(self) -> Copies:
        """Return the copies of all groups, once per plan.

        Block numbers of a group follow those of the groups before it.
        """
        if self.count == 1:
            tier = self.first.host
            return Copies([], []) if tier is None else tier.take_copies()
        outs: list[tuple[int, int]] = []
        ins: list[tuple[int, int]] = []
        for group, kv in enumerate(self.ledgers):
            copies, device = kv.take_copies(), group * kv.pool.num_blocks
            host = 0 if kv.host is None else group * kv.host.pool.num_blocks
            outs += [(block + device, to + host) for block, to in copies.outs]
            ins += [(source + host, block + device) for source, block in copies.ins]
        return Copies(outs, ins)

    def take_state_copies(self) -> list[tuple[int, int]]:
        """Return the copies of recurrent states of all groups, once per plan.

        Slot numbers of a group, on the device and then on the host, follow those of the groups before it.
        """
        copies: list[tuple[int, int]] = []
        for first, kv in self._first_slots() if self.has_states else ():
            copies += [(source + first, target + first) for source, target in kv.take_state_copies()]
        return copies

    def take_state_replays(self) -> list[tuple[int, int]]:
        """Return the replays of all groups, once per plan, with slots numbered as for the copies."""
        replays: list[tuple[int, int]] = []
        for first, kv in self._first_slots() if self.has_states else ():
            replays += [(slot + first, count) for slot, count in kv.take_state_replays()]
        return replays

    def _first_slots(self) -> Iterator[tuple[int, KvLedger]]:
        """Yield each group's ledger with the number of its first state slot."""
        for group, kv in enumerate(self.ledgers):
            yield 0 if kv.states is None else group * (kv.states.num_slots + kv.states.num_host_slots), kv

    def take_kv_loads(self) -> list[KvLoad]:
        """Return the KV loads from other engines of all groups, once per plan, to run after the copies."""
        return [kv_load for kv in self.ledgers for kv_load in kv.take_kv_loads()]

    def forget_tenants(self, marks: frozenset[bytes]) -> int:
        """Delete the cached blocks of these tenants, and return how many there were."""
        return sum(kv.forget_tenants(marks) for kv in self.ledgers)

    def forget(self) -> None:
        """Drop the contents of all caches. No sequence may hold blocks."""
        for kv in self.ledgers:
            kv.forget()
