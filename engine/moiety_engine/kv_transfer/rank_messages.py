"""Control messages of rank 0 for KV transfer over several ranks, in order with the steps.

Each rank of the prefill engine sends its part of the KV to the ranks of the decode engine that need it.
"""

from __future__ import annotations

import msgspec

from moiety_wire.roles import KvRanks

ADDRESS_SEPARATOR = ","  # between the addresses of an engine's ranks, in order of the ranks


class SendBegin(msgspec.Struct, frozen=True, array_like=True):
    """Announcement of a transfer: its destination, and the tokens that it has."""

    addresses: list[str]
    host: str
    token: str
    num_tokens: int
    prompt_hash: bytes
    ranks: KvRanks = KvRanks()  # of the decode engine; as many as there are addresses


class SendRange(msgspec.Struct, frozen=True, array_like=True):
    """Range of tokens of one prompt that a step sends.

    `tables` are the blocks of each cache group; the first token is in the first block. `state_slot` is the slot of the
    sequence's recurrent state; -1 without one. `group` is the group of ranks that computes the prompt.
    """

    transfer_id: str
    first: int
    end: int
    tables: list[list[int]]
    state_slot: int
    begin: SendBegin | None = None  # with the first range
    group: int = 0


class EndSend(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The request has ended: end its transfer, or cancel it if it is not complete."""

    transfer_id: str
    is_complete: bool


class OpenReceiver(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Listen for KV. `secret` authorises transfers at all ranks."""

    secret: str


class PollTransfer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Claim a transfer, and report to all ranks whether this rank's part has arrived or is lost."""

    transfer_id: str
    prompt_hash: bytes


class LoadTransfer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Copy received KV into the cache; the arguments of `StagingBuffer.load`."""

    transfer_id: str
    first: int
    tables: list[list[int]]
    firsts: list[int]
    state_slot: int


class DropTransfer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Drop received KV. An unknown transfer is ignored."""

    transfer_id: str


TransferMessage = EndSend | OpenReceiver | PollTransfer | LoadTransfer | DropTransfer
