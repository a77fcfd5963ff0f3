"""Messages of rank 0 about LoRA adapters, which the other ranks execute in their order."""

from __future__ import annotations

import msgspec


class LayOutAdapters(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reallocate the adapter slots; see `AdapterStacks.lay_out`. A key is (layer, product)."""

    keys: list[tuple[int, str]]
    num_slots: int
    rank: int
    moves: dict[int, int]


class SentModule(msgspec.Struct, frozen=True, array_like=True):
    """Matrices of an adapter's module, in the type that adapters are served in: A [r, num_inputs] and B [N, r]."""

    layer: int
    name: str
    num_inputs: int
    down: bytes
    up: bytes


class SendAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Begin to arrange this rank's part of an adapter, in a thread. `rank` is that of its matrices."""

    number: int
    rank: int
    modules: list[SentModule]


class LoadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Write the adapter with this number, which was sent before, into a slot; the slots are large enough."""

    slot: int
    number: int


class DropAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Drop the adapter with this number, which was sent before, if it is still there."""

    number: int


AdapterMessage = LayOutAdapters | SendAdapter | LoadAdapter | DropAdapter
