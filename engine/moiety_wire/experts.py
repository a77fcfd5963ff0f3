"""Expert load reports of engines.

L layers with experts, E experts. Counts are sent as unsigned integers of the smallest size that holds them all.

A *pick* is a token that a layer sent to an expert: a token makes L · K picks. Tenants beyond those that an engine
counts separately are summed up as OTHER_TENANTS.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

import msgspec

OTHER_TENANTS = "other"
QUANTILES = (0.5, 0.9, 0.99, 1.0)  # quantiles over a layer's experts in ExpertBalance
_CODES = "BHIQ"  # array type codes of unsigned integers of 1, 2, 4 and 8 bytes
assert sys.byteorder == "little", "the wire's numbers are little-endian"


def pack_counts(counts: Iterable[int]) -> bytes:
    """Return the type code of the smallest fitting integer, followed by the numbers."""
    values = array("Q", counts)
    largest = max(values, default=0)
    code = next(code for code in _CODES if largest >> 8 * array(code).itemsize == 0)
    return code.encode() + (values if code == "Q" else array(code, values)).tobytes()


def unpack_counts(data: bytes) -> array[int]:
    """Return the packed numbers. Raises ValueError for data that `pack_counts` did not create."""
    code = data[:1].decode("latin-1")
    if code not in _CODES or not code:
        raise ValueError("counts begin with the size of their numbers")
    values = array(code)
    values.frombytes(data[1:])
    return values


def pack_shares(shares: Iterable[float]) -> bytes:
    return array("f", shares).tobytes()


def unpack_shares(data: bytes) -> array[float]:
    """Return the packed shares. Raises ValueError for data that `pack_shares` did not create."""
    values = array("f")
    values.frombytes(data)
    return values


class ExpertLoadQuery(msgspec.Struct, frozen=True, tag="ask_experts"):
    """Request to an engine for its expert load in the last minutes, of one tenant or of all.

    `minutes` 0 means since the engine's start. The answer is an ExpertLoad with the same `query_id`.
    """

    query_id: int
    minutes: int
    tenant_id: str | None = None


class TenantTokens(msgspec.Struct, frozen=True, array_like=True):
    """Number of tokens of a tenant that went through the model."""

    tenant_id: str
    tokens: int


class ExpertInterval(msgspec.Struct, frozen=True, array_like=True):
    """Expert load of one minute.

    For each layer: all picks, the picks of its busiest expert, and the number of active experts, each summed over the
    steps. `steps` and the active experts are only set in a report over all tenants, since a step belongs to all
    tenants.
    """

    at_unix_s: int
    steps: int
    picks_L: bytes
    busiest_L: bytes
    active_L: bytes


class ScaleExpertRanks(msgspec.Struct, frozen=True, tag="scale_expert_ranks"):
    """Change the number of ranks that hold experts only, while the engine serves.

    Loads report the number, and the reason if the engine cannot have it.
    """

    num_ranks: int


class ExpertLoad(msgspec.Struct, frozen=True, tag="expert_load"):
    """Report of an engine: the picks of each expert of each layer in the requested minutes.

    It also has these minutes one by one, and the tokens by tenant. `layers` is empty where the model has no experts.
    """

    query_id: int
    since_unix_s: int  # start of the counts: the engine's start, or the first minute
    as_of_unix_s: int
    layers: tuple[int, ...] = ()
    num_experts: int = 0
    top_k: int = 0
    picks_LE: bytes = b""
    intervals: list[ExpertInterval] = []
    tenants: list[TenantTokens] = []
    expert_bytes: int = 0  # bytes of the weights of one expert in one layer
    num_groups: int = 1  # expert groups, for routing limited to a few groups per token
    num_parts: int = 0  # expert-parallel parts between which experts move; 0 if they never move
    slots_LR: bytes = b""  # expert in each slot of each layer, the parts' slots one after the other


class ExpertBalance(msgspec.Struct, frozen=True, tag="expert_balance"):
    """Report of an engine on how evenly the last minutes' picks were distributed.

    It is sent a few times a minute while the engine works. For each layer: the mean load of its experts ÷ the largest,
    the load at QUANTILES ÷ the mean, and the experts active in a step.
    """

    minutes: int
    layers: tuple[int, ...]
    picks_total: int  # since the engine's start
    balancedness: float  # over all layers: Σ of the means ÷ Σ of the largest
    balancedness_L: bytes
    quantiles_LQ: bytes
    active_L: bytes
