"""What two engines say to each other about the KV of one request.

The sender connects a DEALER socket to the receiver's ROUTER. `Begin` comes first, then a `KvChunk` for each layer of
each
stretch of the prompt as soon as it is computed, then `End`, or `Cancel` at any time. Bytes of a piece follow it as
frames of their own, unless both engines see the same memory. The receiver answers with exactly one `Received` or
`Refused`: then nothing of the transfer concerns the sender any more.

A transfer begins once, with the token that a gateway made for it, and belongs to the connection that began it: what
others send under its id is dropped.

All pieces together fill `num_bytes`, each from its `offset` on: of a layer and a stretch of tokens first all keys, then
all values, or whatever parts the layer's cache has, each token by token.
"""

from __future__ import annotations

import msgspec


class TensorLayout(msgspec.Struct, frozen=True, array_like=True):
    """What a layer's cache has for each token: keys, values, scales or latent rows."""

    dtype: str
    shape: tuple[int, ...]  # of one token


Form = tuple[tuple[TensorLayout, ...], ...]  # of all layers


class Begin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """KV of the first `num_tokens` tokens of a prompt is about to come."""

    transfer_id: str
    num_tokens: int
    num_bytes: int
    prompt_hash: bytes  # of those tokens
    form: Form
    segment: str = ""  # a file with the memory that the pieces go to; "": they come along
    way: str = ""
    rotation: str = ""  # of the sender's cache, as KvCache has it
    token: str = ""  # by which a gateway has allowed it


class KvChunk(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Of tokens `first` to `end` - 1, what one layer has."""

    transfer_id: str
    layer: int
    first: int
    end: int
    offset: int


class End(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All pieces have been sent."""

    transfer_id: str


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """No more pieces come, and nobody wants those that did."""

    transfer_id: str


class Received(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All of it is there."""

    transfer_id: str


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The receiver does not want it, and why."""

    transfer_id: str
    reason: str


ToReceiver = Begin | KvChunk | End | Cancel
ToSender = Received | Refused
