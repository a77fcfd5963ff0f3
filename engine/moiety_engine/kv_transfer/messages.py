"""Messages between two engines for the KV transfer of one request.

The sender connects a DEALER socket to the receiver's ROUTER. `Begin` comes first, then a `KvChunk` for each layer of
each range of prompt tokens as soon as it is computed, then `End`, or `Cancel` at any time. The bytes of a chunk follow
it as separate frames, unless both engines share memory or the receiver reads the sender's. The receiver answers with
exactly one `Received` or `Refused`; the sender is then done with the transfer.

Each rank of the sending engine that has a part of what a rank of the receiving engine needs sends it that part. The
part begins once, with the token that a gateway created for the transfer, and belongs to the connection that began it.
Messages of other connections under its id are dropped. The transfer is complete at a rank when all parts are.

All chunks together fill `num_bytes`, each from its `offset` on. The chunk of a layer and a range of tokens contains all
keys, then all values, or the other parts of that layer's cache, each part token by token; of compressed entries, those
whose last token is in the range. The state of a recurrent
layer after the last token is one chunk, of that token; these layers are numbered after all others.
"""

from __future__ import annotations

import msgspec

from moiety_engine.config import KvTransport
from moiety_wire.roles import KvRanks


class TensorLayout(msgspec.Struct, frozen=True, array_like=True):
    """One part of a layer's cache: keys, values, scales or latent rows."""

    dtype: str
    shape: tuple[int, ...]  # shape per token


Form = tuple[tuple[TensorLayout, ...], ...]  # layout of all layers


class CacheShard(msgspec.Struct, frozen=True, array_like=True):
    """Part of the cache of one layer: units `first` to `end` - 1 of `num_units` equal ones; see `cache_shards`.

    Of a layer with rows of every token it has those at the positions p with p mod `stride` = `phase`. A compressed
    entry, which is a row of several tokens, is at the position of the last of them.
    """

    layer: int  # of the whole model; the hidden states come after all layers
    first: int
    end: int
    num_units: int
    stride: int = 1
    phase: int = 0

    def positions(self, first: int, end: int) -> range:
        """Return the shard's positions from `first` to `end` - 1."""
        return range(first + (self.phase - first) % self.stride, end, self.stride)


class RemoteMemory(msgspec.Struct, frozen=True, array_like=True):
    """Memory of the sender that the receiver reads chunks from by NIXL."""

    agent: bytes  # metadata of its agent
    address: int
    nonce: bytes  # that follows the chunks there until the sender frees the memory


class Begin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Announces what one rank sends to another of the KV of the first `num_tokens` tokens of a prompt."""

    transfer_id: str
    num_tokens: int
    num_bytes: int
    prompt_hash: bytes  # hash of those tokens
    form: Form  # of what is sent, layer by layer
    segment: str = ""  # file of the shared memory for the chunks; "": the messages carry them
    transport: str = ""
    rotation: str = ""  # rotation of the sender's cache, see KvCache
    token: str = ""  # authorisation by a gateway
    windows: tuple[int | None, ...] = ()  # windows of the sender's block tables, see KvCache
    states: Form = ()  # layout of the state of each recurrent layer
    ranks: KvRanks = KvRanks()  # of the sending engine
    rank: int = 0  # that sends
    shards: tuple[CacheShard, ...] = ()  # that it sends: of the layers of `form`, then of those of `states`
    memory: RemoteMemory | None = None  # that holds the chunks with the transport nixl

    @property
    def announced_transport(self) -> KvTransport:
        """Transport by which the chunks come according to the fields that it needs."""
        if self.memory is not None:
            return KvTransport.NIXL
        return KvTransport.MEMORY if self.segment else KvTransport.TCP

    def why_apart(self, other: Begin) -> str:
        """Return why two parts are not of one transfer; "" if they can be."""
        both = [(one.num_tokens, one.prompt_hash, one.ranks) for one in (self, other)]
        return "" if both[0] == both[1] else "its parts are of different prompts or engines"


class KvChunk(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """KV of one layer for the tokens `first` to `end` - 1; of these, for the positions of the layer's shard."""

    transfer_id: str
    layer: int
    first: int
    end: int
    offset: int


class End(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All chunks have been sent."""

    transfer_id: str


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The transfer ends early, and its chunks are discarded."""

    transfer_id: str


class Received(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The KV has arrived completely."""

    transfer_id: str


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The receiver refuses the transfer, with the reason."""

    transfer_id: str
    reason: str


ToReceiver = Begin | KvChunk | End | Cancel
ToSender = Received | Refused
