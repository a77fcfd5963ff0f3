"""Control messages of rank 0 to the other ranks, which execute the same operations in the same order as rank 0.

With a single rank nothing is sent.

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
from moiety_engine.images.feature_cache import FeaturePart
from moiety_engine.images.prompt_images import PromptImage
from moiety_engine.kv_transfer.rank_messages import SendRange, TransferMessage
from moiety_engine.model.batch import Spread
from moiety_engine.moe.tenants import NO_TENANT
from moiety_engine.runner.adapter_messages import AdapterMessage, LayOutAdapters, LoadAdapter
from moiety_engine.runner.block_tables import HostTable
from moiety_engine.runner.expert_messages import ExpertMessage
from moiety_engine.runner.image_rows import HostImages
from moiety_engine.runner.inputs import HostBatch
from moiety_engine.runner.state_rows import HostStates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from moiety_engine.distribution.rank_group import RankGroup
    from moiety_engine.staging import Staging

_INT32 = ("query_start_S1", "context_len_S", "block_table_SB")
_INT64 = ("token_ids_T", "positions_T", "slots_T", "wanted_rows_L", "pending_rows_P", "sampled_rows_P")


class Allocate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Release the previous cache, and allocate a KV cache, with a host tier if `num_host_blocks` is not 0."""

    num_blocks: int
    block_size: int
    num_host_blocks: int
    image_cache_bytes: int = 0
    num_state_slots: int = 0
    num_host_state_slots: int = 0
    num_record_tokens: int = 0
    windows: tuple[int | None, ...] = ()  # of the block tables, see KvCache


class Release(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Release the KV cache."""


class EncodeImage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Encode an image and keep the result under the key."""

    key: bytes
    image: PromptImage


class ForgetImages(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Drop the encoded images of the tenants with these marks."""

    marks: list[bytes]


class GroupImages(msgspec.Struct, frozen=True, array_like=True):
    """Rows of images in a rank group's part of a step: the arrays of HostImages (int64), and its parts."""

    rows: bytes
    positions: bytes
    parts: list[FeaturePart]

    @staticmethod
    def of(images: HostImages) -> GroupImages:
        return GroupImages(images.rows_I.tobytes(), images.positions_3I.tobytes(), list(images.parts))

    def images(self) -> HostImages:
        """Return the HostImages that this message was made from."""
        rows_I, positions_C = (np.frombuffer(bytearray(data), dtype=np.int64) for data in (self.rows, self.positions))
        return HostImages(rows_I, positions_C.reshape(3, -1), tuple(self.parts))


class GroupStates(msgspec.Struct, frozen=True, array_like=True):
    """Recurrent states of a rank group's part of a step: the fields of HostStates."""

    run_start: bytes
    slots: bytes
    begins: bytes
    num_single: int
    max_run: int
    recorded_rows: bytes
    record_places: bytes

    @staticmethod
    def of(states: HostStates) -> GroupStates:
        return GroupStates(
            states.run_start_R1.tobytes(),
            states.slots_R.tobytes(),
            states.begins_R.tobytes(),
            states.num_single,
            states.max_run,
            states.recorded_rows_K.tobytes(),
            states.record_places_K.tobytes(),
        )

    def states(self) -> HostStates:
        """Return the HostStates that this message was made from."""
        slots_R, rows_K, places_K = (
            np.frombuffer(bytearray(data), dtype=np.int64)
            for data in (self.slots, self.recorded_rows, self.record_places)
        )
        run_start_R1 = np.frombuffer(bytearray(self.run_start), dtype=np.int32)
        begins_R = np.frombuffer(bytearray(self.begins), dtype=bool)
        return HostStates(run_start_R1, slots_R, begins_R, self.num_single, self.max_run, rows_K, places_K)


class GroupStep(msgspec.Struct, frozen=True, array_like=True):
    """A rank group's part of a step. `arrays` are the arrays of HostBatch by name."""

    arrays: dict[str, bytes]
    num_tokens: int
    num_wanted: int
    num_scored: int
    num_decode: int
    max_context: int
    max_query: int
    adapter_rows: bytes | None = None  # adapter slots, int64; None in all groups: no token has an adapter
    images: GroupImages | None = None
    further_tables: list[tuple[bytes, bytes]] = []  # slots_T and block_table_SB of each further cache group
    states: GroupStates | None = None

    @staticmethod
    def of(host: HostBatch) -> GroupStep:
        arrays = {name: getattr(host, name).tobytes() for name in _INT32 + _INT64}
        counts = len(host.token_ids_T), len(host.wanted_rows_L), host.num_scored
        images = None if host.images is None else GroupImages.of(host.images)
        further = [(table.slots_T.tobytes(), table.block_table_SB.tobytes()) for table in host.further_tables]
        states = None if host.states is None else GroupStates.of(host.states)
        sizes = host.num_decode, host.max_context, host.max_query
        adapter_rows = None if host.adapter_T is None else host.adapter_T.tobytes()
        return GroupStep(arrays, *counts, *sizes, adapter_rows, images, further, states)

    def batch(self) -> HostBatch:
        """Return the HostBatch that this message was made from."""
        rows = self.adapter_rows
        adapter_T = None if rows is None else np.frombuffer(bytearray(rows), dtype=np.int64)
        if not self.num_tokens:
            return HostBatch.empty(has_adapters=rows is not None)
        arrays = {name: np.frombuffer(bytearray(self.arrays[name]), dtype=np.int32) for name in _INT32}
        arrays |= {name: np.frombuffer(bytearray(self.arrays[name]), dtype=np.int64) for name in _INT64}
        num_sequences = len(arrays["context_len_S"])
        arrays["block_table_SB"] = arrays["block_table_SB"].reshape(num_sequences, -1)
        arrays["owner_T"] = np.full(len(arrays["token_ids_T"]), NO_TENANT)  # rank 0 counts expert picks for all ranks
        return HostBatch(
            **arrays,
            num_scored=self.num_scored,
            num_decode=self.num_decode,
            max_context=self.max_context,
            max_query=self.max_query,
            adapter_T=adapter_T,
            images=None if self.images is None else self.images.images(),
            further_tables=tuple(_host_table(*table, num_sequences) for table in self.further_tables),
            states=None if self.states is None else self.states.states(),
        )


def _host_table(slots: bytes, block_tables: bytes, num_sequences: int) -> HostTable:
    table_SB = np.frombuffer(bytearray(block_tables), dtype=np.int32).reshape(num_sequences, -1)
    return HostTable(np.frombuffer(bytearray(slots), dtype=np.int64), table_SB)


class RunStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run a step.

    `order` (int64) gives the index of each wanted row of the step among the wanted rows of all parts. The first
    `num_sampled` of the wanted rows are sampled; the last rows precede prompt tokens that are scored.
    """

    parts: list[GroupStep]
    order: bytes
    num_sampled: int
    num_micro_batches: int = 1
    sends: list[SendRange] = []  # KV for other engines
    ends_later: bool = False  # EndStep follows, possibly after further steps have begun

    @property
    def num_scored(self) -> int:
        return sum(part.num_scored for part in self.parts)

    @property
    def has_adapters(self) -> bool:
        """Return whether any token of the step has an adapter."""
        return any(part.adapter_rows is not None for part in self.parts)

    @property
    def image_parts(self) -> list[FeaturePart]:
        """Parts of images in the step, of all groups."""
        return [image_part for part in self.parts if part.images is not None for image_part in part.images.parts]

    def spread(self, staging: Staging) -> Spread | None:
        if len(self.parts) == 1:
            return None
        order_L = staging.upload(np.frombuffer(bytearray(self.order), dtype=np.int64))
        num_tokens, num_wanted = zip(*((part.num_tokens, part.num_wanted) for part in self.parts), strict=True)
        return Spread(num_tokens, num_wanted, order_L)


class EndStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the oldest step that `RunStep` has begun: receive the last stage's results, and compute the logits."""


class RunDraftPass(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run a pass of the draft model or of an MTP layer. `number` counts the passes of a step from 0.

    Rank 0 then broadcasts the tokens of the pass before, if it had any. Each wanted row gets a token.
    """

    parts: list[GroupStep]
    number: int

    @property
    def num_wanted(self) -> int:
        return sum(part.num_wanted for part in self.parts)

    def spread(self, staging: Staging) -> Spread | None:
        if len(self.parts) == 1:
            return None
        num_tokens, num_wanted = zip(*((part.num_tokens, part.num_wanted) for part in self.parts), strict=True)
        return Spread(num_tokens, num_wanted, staging.upload(np.arange(self.num_wanted)))


class Swap(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Copy blocks out and in. The block numbers are those of the plan, which covers all groups."""

    outs: list[tuple[int, int]]
    ins: list[tuple[int, int]]


class MoveStates(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Replay recorded tokens (slot, number of tokens), then copy recurrent states between slots, in order.

    A copy is (source, target). The numbers are those of the plan.
    """

    replays: list[tuple[int, int]]
    copies: list[tuple[int, int]]


class OffloadWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Offload the weights to host memory, or to a file in the folder, unless they are offloaded already."""

    folder: str


class ReloadWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reload the weights, if they are offloaded."""


class OpenDiskRows(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Allocate `count` rows between the cache and the disk for each id; open the rank's folder the first time.

    `key` authenticates the requests of rank 0 about files.
    """

    rows_ids: tuple[int, ...]
    count: int
    key: bytes


class CopyDiskRows(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Copy blocks of a rank group between its cache and its rows.

    `outs` are pairs (device block, row), `ins` pairs (row, device block); blocks are numbered within the group.
    """

    group: int
    rows_id: int
    outs: list[tuple[int, int]]
    ins: list[tuple[int, int]]


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the group."""


ControlMessage = (
    Allocate
    | Release
    | RunStep
    | EndStep
    | RunDraftPass
    | Swap
    | MoveStates
    | ExpertMessage
    | EncodeImage
    | ForgetImages
    | AdapterMessage
    | OffloadWeights
    | ReloadWeights
    | OpenDiskRows
    | CopyDiskRows
    | TransferMessage
    | Stop
)


class ControlSender:
    """Rank 0's sender of control messages. Used by the step loop's thread only."""

    def __init__(
        self, rank_group: RankGroup | None = None, *, overlaps: bool = False, steps_in_flight: int = 1
    ) -> None:
        """Create the sender.

        `overlaps` means that a step is launched before the tokens of the previous one are known, so the other ranks
        receive them from the device. With several `steps_in_flight`, steps begin before earlier ones end.
        """
        self.steps_in_flight = steps_in_flight
        self._rank_group = rank_group
        self._sends_tokens = rank_group is not None and overlaps
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: ControlMessage) -> None:
        if self._rank_group is not None:
            self._rank_group.channel.send(self._encoder.encode(message))

    @contextmanager
    def run_on_all_ranks(
        self, message: Allocate | LayOutAdapters | LoadAdapter | OffloadWeights | ReloadWeights | OpenDiskRows
    ) -> Iterator[None]:
        """Run this rank's own part of an operation that may run out of memory on any rank.

        Raises OutOfMemory if it failed on another rank, so that no rank continues as if all had succeeded.
        """
        self.send(message)
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            all_succeeded = self._rank_group is None or self._rank_group.all_succeeded(succeeded)
        if not all_succeeded:
            raise OutOfMemory("another rank is out of memory, or has failed; see its log")

    def step(
        self,
        hosts: list[HostBatch],
        order_L: np.ndarray,
        num_sampled: int,
        num_micro_batches: int,
        sends: list[SendRange],
    ) -> None:
        if self._rank_group is not None:
            parts, ends_later = [GroupStep.of(host) for host in hosts], self.steps_in_flight > 1
            self.send(RunStep(parts, order_L.tobytes(), num_sampled, num_micro_batches, sends, ends_later))

    def end_step(self) -> None:
        """Let the other ranks end the oldest step that has begun."""
        self.send(EndStep())

    def draft_pass(self, hosts: list[HostBatch], number: int, before_L: Tensor | None) -> None:
        """Let the other ranks run a pass of the draft model. `before_L`: tokens of the pass before, if it had any."""
        if self._rank_group is not None:
            self.send(RunDraftPass([GroupStep.of(host) for host in hosts], number))
            if before_L is not None:
                self._rank_group.ranks.everyone.broadcast_first(before_L)

    def swap(self, outs: list[tuple[int, int]], ins: list[tuple[int, int]]) -> None:
        if outs or ins:
            self.send(Swap(outs, ins))

    def move_states(self, replays: list[tuple[int, int]], copies: list[tuple[int, int]]) -> None:
        if replays or copies:
            self.send(MoveStates(replays, copies))

    def send_tokens(self, token_L: Tensor) -> None:
        """Send the other ranks the tokens that the launched step samples."""
        if self._sends_tokens and self._rank_group is not None and token_L.numel():
            self._rank_group.ranks.everyone.broadcast_first(token_L)

    @property
    def rank_group(self) -> RankGroup | None:
        """The group of several ranks; None with a single rank."""
        return self._rank_group

    @property
    def excluded_ranks(self) -> int:
        """Number of excluded ranks."""
        return 0 if self._rank_group is None else len(self._rank_group.excluded)

    def waited_s(self) -> tuple[float, float]:
        """Return the seconds that attention waited for experts, and experts for attention; see RankGroup."""
        return (0.0, 0.0) if self._rank_group is None else self._rank_group.waited_s()

    def sum_figures(self, own: dict[str, int]) -> dict[str, int]:
        """Return load figures of this rank with those of the other ranks added."""
        return own if self._rank_group is None else self._rank_group.sum_figures(own)

    def explaining(self) -> AbstractContextManager[None]:
        """Return a context for work of all ranks, which reports the cause if a rank is lost."""
        return nullcontext() if self._rank_group is None else explaining()

    def close(self) -> None:
        """End the other ranks, and close the connections to them."""
        if self._rank_group is not None:
            self.send(Stop())
            self._rank_group.close()
            self._rank_group = None

    def abandon(self, reason: str) -> None:
        """End the other ranks with a reason, because this rank cannot continue.

        The ranks may be in the middle of a collective operation.
        """
        if self._rank_group is not None:
            self._rank_group.abandon(reason)
            self._rank_group = None
