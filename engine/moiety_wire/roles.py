"""Roles of engines in disaggregated prefill and decode, and the handoff of a request between them.

The gateway first submits a request to a prefill engine, with a `KvHandoff` that names the destination of the prompt's
KV. That engine computes the prompt and one token, and ends the request with `prefill_done`. The gateway then submits
the request with its output so far, as after an engine failure, and the transfer's id to the decode engine. That engine
does not recompute the KV that it received under this id; it computes KV that did not arrive. So lost KV costs only
time.

A `KvHandoff` is only sent to an engine whose card has `hands_over`, a transfer's id only to one with a `kv_address`.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b

import msgspec

ANY_HOST = "*"  # in a kv_address: the host at which the gateway reaches the engine


class EngineRole(StrEnum):
    """Kind of requests that gateways send to an engine. Every engine can serve any request completely."""

    BOTH = "both"
    PREFILL = "prefill"  # prompts whose outputs another engine generates
    DECODE = "decode"  # outputs of prompts that another engine has computed


class KvRanks(msgspec.Struct, frozen=True, array_like=True):
    """Division of an engine's KV over its ranks: that of a request by heads (`tp`) and by layers (`pp`).

    Of the ranks with the same heads, `dcp` divide the positions (decode context parallelism). Every rank sends or
    receives its own part, at its own address. Each of several groups of such ranks (DP attention) has the KV of other
    requests; `transfer_group` is the group that a transfer goes to.
    """

    tp: int = 1
    pp: int = 1
    groups: int = 1
    dcp: int = 1


class KvHandoff(msgspec.Struct, frozen=True):
    """Destination of a prompt's KV. The transfer's id gives access to the KV, so it must not be guessable."""

    transfer_id: str
    address: str  # KV address of the other engine; of several ranks, in order of the ranks, with commas
    host: str = ""  # host of the other engine; engines on one host share memory
    token: str = ""  # authorises the sender to begin this transfer: see `transfer_token`
    ranks: KvRanks = KvRanks()  # of the other engine


class KvTransferTimes(msgspec.Struct, frozen=True, array_like=True):
    """Times and size of a KV transfer, in unix nanoseconds of the receiving engine's clock."""

    begun_unix_ns: int  # time of the announcement
    ended_unix_ns: int  # time of completion
    num_tokens: int
    num_bytes: int
    transport: str


def transfer_group(transfer_id: str, num_groups: int) -> int:
    """Return the group of ranks that receives a transfer and continues its request. Equal on all engines."""
    hashed = blake2b(transfer_id.encode(), digest_size=8, person=b"moiety-kv-group").digest()
    return int.from_bytes(hashed, "big") % num_groups


def transfer_token(secret: str, transfer_id: str) -> str:
    """Return the token that authorises a sender to begin this transfer to the engine with that `kv_secret`.

    The engine reveals its secret only to gateways, so it accepts only their transfers; "" without a secret.
    """
    if not secret:
        return ""
    return blake2b(transfer_id.encode(), digest_size=16, key=secret.encode(), person=b"moiety-kv").hexdigest()
