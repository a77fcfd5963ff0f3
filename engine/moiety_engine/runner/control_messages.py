"""What rank 0 tells the other ranks to do: the same as it does itself, in the same order. Where there are no others
nothing is said.

T tokens of the step, S sequences, B blocks a row, L rows whose results are wanted, P tokens that the running step
samples.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from moiety_engine.distribution.rank_heartbeat import explaining
from moiety_engine.errors import OutOfMemory
from moiety_engine.model.batch import Spread
from moiety_engine.moe.tenants import NOBODY
from moiety_engine.runner.inputs import HostBatch
from moiety_placement.transition import Write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from moiety_engine.distribution.rank_group import RankGroup
    from moiety_engine.staging import Staging

_INT32 = ("query_start_S1", "context_len_S", "block_table_SB")
_INT64 = ("token_ids_T", "positions_T", "slots_T", "wanted_rows_L", "pending_rows_P", "sampled_rows_P")


class Allocate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Make a cache, and a host tier for it if it has blocks; what was there before is given up."""

    num_blocks: int
    block_size: int
    num_host_blocks: int


class Release(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give up the cache."""


class GroupStep(msgspec.Struct, frozen=True, array_like=True):
    """What a group of ranks has of a step. `arrays` are those of HostBatch, by name."""

    arrays: dict[str, bytes]
    num_tokens: int
    num_wanted: int
    num_scored: int
    num_decode: int
    max_context: int
    max_query: int

    @staticmethod
    def of(host: HostBatch) -> GroupStep:
        arrays = {name: getattr(host, name).tobytes() for name in _INT32 + _INT64}
        counts = len(host.token_ids_T), len(host.wanted_rows_L), host.num_scored
        return GroupStep(arrays, *counts, host.num_decode, host.max_context, host.max_query)

    def batch(self) -> HostBatch:
        """What it was made of."""
        if not self.num_tokens:
            return HostBatch.empty()
        arrays = {name: np.frombuffer(bytearray(self.arrays[name]), dtype=np.int32) for name in _INT32}
        arrays |= {name: np.frombuffer(bytearray(self.arrays[name]), dtype=np.int64) for name in _INT64}
        arrays["block_table_SB"] = arrays["block_table_SB"].reshape(len(arrays["context_len_S"]), -1)
        arrays["owner_T"] = np.full(len(arrays["token_ids_T"]), NOBODY)  # rank 0 counts experts for all
        return HostBatch(
            **arrays,
            num_scored=self.num_scored,
            num_decode=self.num_decode,
            max_context=self.max_context,
            max_query=self.max_query,
        )


class RunStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run one. `order` says where each wanted row of the step is among those of all parts, int64; the first
    `num_sampled` of them are sampled, the last ones come before tokens that are scored."""

    parts: list[GroupStep]
    order: bytes
    num_sampled: int
    num_micro_batches: int = 1

    @property
    def num_scored(self) -> int:
        return sum(part.num_scored for part in self.parts)

    def spread(self, staging: Staging) -> Spread | None:
        if len(self.parts) == 1:
            return None
        order_L = staging.upload(np.frombuffer(bytearray(self.order), dtype=np.int64))
        num_tokens, num_wanted = zip(*((part.num_tokens, part.num_wanted) for part in self.parts), strict=True)
        return Spread(num_tokens, num_wanted, order_L)


class Swap(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Copy blocks out and in, as a plan has them of all groups."""

    outs: list[tuple[int, int]]
    ins: list[tuple[int, int]]


class MoveExperts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give slots of a layer other experts."""

    layer: int
    writes: list[Write]


class OffloadWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The weights go to host memory, if they are not there."""


class ReloadWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """They come back, if they are away."""


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The group ends."""


Order = Allocate | Release | RunStep | Swap | MoveExperts | OffloadWeights | ReloadWeights | Stop


class ControlSender:
    """Rank 0's end. Used by the step loop's thread only."""

    def __init__(self, rank_group: RankGroup | None = None, *, overlaps: bool = False) -> None:
        """`overlaps`: steps are launched before the tokens of the one before are known, so the others need them from
        the device."""
        self._rank_group = rank_group
        self._tells_tokens = rank_group is not None and overlaps
        self._encoder = msgspec.msgpack.Encoder()

    def give(self, order: Order) -> None:
        if self._rank_group is not None:
            self._rank_group.channel.send(self._encoder.encode(order))

    @contextmanager
    def together(self, order: Allocate | OffloadWeights | ReloadWeights) -> Iterator[None]:
        """Around this rank's own part of what may find no room on any. Raises OutOfMemory where another had none: then
        nobody goes on as if all had."""
        self.give(order)
        did = False
        try:
            yield
            did = True
        finally:
            all_did = self._rank_group is None or self._rank_group.all_did(did)
        if not all_did:
            raise OutOfMemory("another rank has no room: its log says for what, and what to do")

    def step(self, hosts: list[HostBatch], order_L: np.ndarray, num_sampled: int, num_micro_batches: int) -> None:
        if self._rank_group is not None:
            self.give(
                RunStep([GroupStep.of(host) for host in hosts], order_L.tobytes(), num_sampled, num_micro_batches)
            )

    def swap(self, outs: list[tuple[int, int]], ins: list[tuple[int, int]]) -> None:
        if outs or ins:
            self.give(Swap(outs, ins))

    def tell_tokens(self, token_L: Tensor) -> None:
        """What the step that was launched samples."""
        if self._tells_tokens and self._rank_group is not None and token_L.numel():
            self._rank_group.ranks.everyone.copy_first(token_L)

    @property
    def masked_ranks(self) -> int:
        """How many the group does without."""
        return 0 if self._rank_group is None else len(self._rank_group.masked)

    def waited_s(self) -> tuple[float, float]:
        """Of attention and of experts, each for the other: see RankGroup."""
        return (0.0, 0.0) if self._rank_group is None else self._rank_group.waited_s()

    def explaining(self) -> AbstractContextManager[None]:
        """Around what all ranks do together, for the case that one of them is lost."""
        return nullcontext() if self._rank_group is None else explaining()

    def close(self) -> None:
        """The others end, and what connects them with this one."""
        if self._rank_group is not None:
            self.give(Stop())
            self._rank_group.close()
            self._rank_group = None

    def abandon(self, reason: str) -> None:
        """This rank cannot go on, perhaps in the middle of what all do together: the others end, and say why."""
        if self._rank_group is not None:
            self._rank_group.abandon(reason)
            self._rank_group = None
