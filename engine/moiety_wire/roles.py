"""What an engine is there for, and how a request goes from the engine that computes its prompt to the one that answers.

A request is first submitted to a prefill engine with `KvHandoff`: where the KV of its prompt is to go. That engine
computes the prompt and one token, and ends it with `prefill_done`. The gateway then submits it, as one whose engine was
lost, with its output so far to the other engine, and with the transfer's id. What that engine got under this id it need
not compute; what did not come it computes itself. So KV that is lost costs time and nothing else.

Only an engine whose card says `hands_over` is given a `KvHandoff`, and only one with a `kv_address` a transfer's id.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b

import msgspec

ANY_HOST = "*"  # in a kv_address: the host by which the gateway reaches the engine


class EngineRole(StrEnum):
    """What requests an engine is to be given. It can serve any of them whole."""

    BOTH = "both"
    PREFILL = "prefill"  # prompts, whose answers another engine writes
    DECODE = "decode"  # answers to prompts that another engine has computed


class KvHandoff(msgspec.Struct, frozen=True):
    """Where the KV of a prompt goes. Who knows the id gets the KV, so it cannot be guessed."""

    transfer_id: str
    address: str  # of the other engine, for KV
    host: str = ""  # on which it runs; engines of one host share memory
    token: str = ""  # that lets the sender begin this transfer: see `transfer_token`


class KvTransferTimes(msgspec.Struct, frozen=True, array_like=True):
    """How KV came from another engine. Times are unix nanoseconds, by the clock of the engine that it came to."""

    begun_unix_ns: int  # it was announced
    ended_unix_ns: int  # all was there
    num_tokens: int
    num_bytes: int
    way: str


def transfer_token(secret: str, transfer_id: str) -> str:
    """Return what a sender must show to begin this transfer to the engine whose card has that `kv_secret`.

    The engine tells its secret to gateways alone, so only a transfer of theirs is accepted; "" without a secret.
    """
    if not secret:
        return ""
    return blake2b(transfer_id.encode(), digest_size=16, key=secret.encode(), person=b"moiety-kv").hexdigest()
