"""Billing context: sent to an engine with a request, and returned if the gateway dies, so that it can be charged."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from moiety_platform.prices.token_cost import Price
from moiety_platform.quota.kinds import Unit
from moiety_platform.quota.lease import Charge, WindowId
from moiety_platform.usage.row import StoredUsageRow, UsageRow

FREE = Price(0, 0, 0)


class BillingContext(msgspec.Struct, frozen=True, array_like=True):
    """Billing data of one request.

    `row` is stored if nothing follows: failed, with the prompt charged. `prices` are the agreed prices by class;
    `leases` are the windows of stocks that the request has holds on, and `replica_id` is the gateway process that owns
    them.
    """

    row: UsageRow
    prices: dict[str, Price]
    leases: list[tuple[WindowId, Unit]]
    replica_id: str
    num_choices: int  # of each prompt

    def cost(self, service_class: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        return self.prices.get(service_class, FREE).cost(prompt_tokens, cached_tokens, output_tokens)

    def charges(self, amounts: Mapping[Unit, int]) -> list[Charge]:
        """Return the charges to book for these amounts."""
        return [Charge(window, self.replica_id, amounts[unit]) for window, unit in self.leases if amounts.get(unit)]


encode_bill: Callable[[BillingContext], bytes] = msgspec.msgpack.Encoder().encode


class StoredBillingContext(BillingContext, frozen=True, array_like=True):
    """Billing context as an engine returns it, possibly one of a gateway of an earlier release."""

    row: StoredUsageRow


_decoder = msgspec.msgpack.Decoder(StoredBillingContext)


def decode_bill(data: bytes) -> BillingContext:
    """Decode a billing context. Raises msgspec.MsgspecError for data that is none of this release's form."""
    stored = _decoder.decode(data)
    return BillingContext(stored.row.present, stored.prices, stored.leases, stored.replica_id, stored.num_choices)


def request_of(request_id: str) -> str:
    """Return the request id that an engine's id of an answer contains."""
    return request_id.rpartition("-")[0]


def sequence_of(request_id: str) -> int:
    """Return the sequence number of an answer within its request, from the engine's id."""
    return int(request_id.rpartition("-")[2])
