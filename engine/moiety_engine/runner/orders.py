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

from moiety_engine.errors import OutOfMemory
from moiety_engine.moe.tenants import NOBODY
from moiety_engine.runner.inputs import HostBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from moiety_engine.distribution.crew import Crew

_INT32 = ("query_start_S1", "context_len_S", "block_table_SB")
_INT64 = ("token_ids_T", "positions_T", "slots_T", "wanted_rows_L", "pending_rows_P", "sampled_rows_P")


class Allocate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Make a cache, and a host tier for it if it has blocks; what was there before is given up."""

    num_blocks: int
    block_size: int
    num_host_blocks: int


class Release(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give up the cache."""


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run one. `arrays` are those of HostBatch, by name. The first `num_sampled` of the wanted rows are sampled, the
    last `num_scored` come before tokens that are scored."""

    arrays: dict[str, bytes]
    num_decode: int
    max_context: int
    max_query: int
    num_sampled: int
    num_scored: int

    @staticmethod
    def of(host: HostBatch, num_sampled: int) -> Step:
        arrays = {name: getattr(host, name).tobytes() for name in _INT32 + _INT64}
        return Step(arrays, host.num_decode, host.max_context, host.max_query, num_sampled, host.num_scored)

    def batch(self) -> HostBatch:
        """What it was made of."""
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


class Swap(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Copy blocks out and in, as `HostKv.run`."""

    outs: list[tuple[int, int]]
    ins: list[tuple[int, int]]


class Leave(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The weights go to host memory, if they are not there."""


class ComeBack(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """They come back, if they are away."""


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The group ends."""


Order = Allocate | Release | Step | Swap | Leave | ComeBack | Stop


class Orders:
    """Rank 0's end. Used by the step loop's thread only."""

    def __init__(self, crew: Crew | None = None, *, overlaps: bool = False) -> None:
        """`overlaps`: steps are launched before the tokens of the one before are known, so the others need them from
        the device."""
        self._crew = crew
        self._tells_tokens = crew is not None and overlaps
        self._encoder = msgspec.msgpack.Encoder()

    def give(self, order: Order) -> None:
        if self._crew is not None:
            self._crew.channel.send(self._encoder.encode(order))

    @contextmanager
    def together(self, order: Allocate | Leave | ComeBack) -> Iterator[None]:
        """Around this rank's own part of what may find no room on any. Raises OutOfMemory where another had none: then
        nobody goes on as if all had."""
        self.give(order)
        did = False
        try:
            yield
            did = True
        finally:
            all_did = self._crew is None or self._crew.all_did(did)
        if not all_did:
            raise OutOfMemory("another rank has no room: its log says for what, and what to do")

    def step(self, host: HostBatch, num_sampled: int) -> None:
        if self._crew is not None:
            self.give(Step.of(host, num_sampled))

    def swap(self, outs: list[tuple[int, int]], ins: list[tuple[int, int]]) -> None:
        if outs or ins:
            self.give(Swap(outs, ins))

    def tell_tokens(self, token_L: Tensor) -> None:
        """What the step that was launched samples."""
        if self._tells_tokens and self._crew is not None and token_L.numel():
            self._crew.ranks.everyone.copy_first(token_L)

    def explaining(self) -> AbstractContextManager[None]:
        """Around what all ranks do together, for the case that one of them is lost."""
        return nullcontext() if self._crew is None else self._crew.explaining()

    def close(self) -> None:
        """The others end, and what connects them with this one."""
        if self._crew is not None:
            self.give(Stop())
            self._crew.close()
            self._crew = None

    def abandon(self, reason: str) -> None:
        """This rank cannot go on, perhaps in the middle of what all do together: the others end, and say why."""
        if self._crew is not None:
            self._crew.abandon(reason)
            self._crew = None
