"""What engines say of their experts' load. L layers with experts, E experts; counts travel as whole numbers of the
smallest size that holds them all.

A *pick* is a token that a layer sent to an expert: a token makes L · K of them. Tenants beyond those that an engine
tells apart are OTHER_TENANTS together.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

import msgspec

OTHER_TENANTS = "other"
QUANTILES = (0.5, 0.9, 0.99, 1.0)  # of a layer's experts, that ExpertBalance tells of
_CODES = "BHIQ"  # unsigned, of 1, 2, 4 and 8 bytes
assert sys.byteorder == "little", "the wire's numbers are little-endian"


def pack_counts(counts: Iterable[int]) -> bytes:
    """A letter for the size of a number, then the numbers."""
    values = array("Q", counts)
    largest = max(values, default=0)
    code = next(code for code in _CODES if largest >> 8 * array(code).itemsize == 0)
    return code.encode() + (values if code == "Q" else array(code, values)).tobytes()


def unpack_counts(data: bytes) -> array[int]:
    """The numbers. Raises ValueError where it was not packed so."""
    code = data[:1].decode("latin-1")
    if code not in _CODES or not code:
        raise ValueError("counts begin with the size of their numbers")
    values = array(code)
    values.frombytes(data[1:])
    return values


def pack_shares(shares: Iterable[float]) -> bytes:
    return array("f", shares).tobytes()


def unpack_shares(data: bytes) -> array[float]:
    """Raises ValueError where it was not packed so."""
    values = array("f")
    values.frombytes(data)
    return values


class AskExperts(msgspec.Struct, frozen=True, tag="ask_experts"):
    """To an engine: what its experts had to do in the last minutes, 0 for since its start; of one tenant or of all.
    Answered by ExpertLoad under the same `ask_id`."""

    ask_id: int
    minutes: int
    tenant_id: str | None = None


class TenantTokens(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens of a tenant went through the model."""

    tenant_id: str
    tokens: int


class ExpertInterval(msgspec.Struct, frozen=True, array_like=True):
    """A minute. For each layer all picks, those of its busiest expert, and how many experts were picked at all, summed
    over the steps (the last and `steps` only where all tenants were asked for: a step is everybody's)."""

    at_unix_s: int
    steps: int
    picks_L: bytes
    busiest_L: bytes
    active_L: bytes


class ExpertLoad(msgspec.Struct, frozen=True, tag="expert_load"):
    """From an engine: the picks of each expert of each layer in the minutes that were asked for, those minutes one by
    one, and whose tokens they were. `layers` is empty where the model has no experts."""

    ask_id: int
    since_unix_s: int  # of the counts: the engine's start, or the first of the minutes
    as_of_unix_s: int
    layers: tuple[int, ...] = ()
    num_experts: int = 0
    top_k: int = 0
    picks_LE: bytes = b""
    intervals: list[ExpertInterval] = []
    tenants: list[TenantTokens] = []
    expert_bytes: int = 0  # the weights of one expert of one layer
    num_groups: int = 1  # of experts, a few of which a token's are chosen from
    num_parts: int = 0  # that the experts are divided into and move between; 0 where they stay where they are
    slots_LR: bytes = b""  # the expert in each slot of each layer, one part's slots after the other's


class ExpertBalance(msgspec.Struct, frozen=True, tag="expert_balance"):
    """From an engine, a few times a minute while it works: how evenly the last minutes' picks fell. For each layer the
    mean load of its experts ÷ the largest, the load at QUANTILES ÷ the mean, and the experts active in a step."""

    minutes: int
    layers: tuple[int, ...]
    picks_total: int  # since the engine's start
    balancedness: float  # of all layers: Σ of the means ÷ Σ of the largest
    balancedness_L: bytes
    quantiles_LQ: bytes
    active_L: bytes
