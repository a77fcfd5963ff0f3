"""What goes to an engine with a request, and comes back should the gateway die: all that is needed to charge it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from moiety_platform.prices.terms import Price
from moiety_platform.quota.kinds import Unit
from moiety_platform.quota.lease import Charge, WindowId
from moiety_platform.usage.row import UsageRow

FREE = Price(0, 0, 0)


class BillingContext(msgspec.Struct, frozen=True, array_like=True):
    """`row` is what is stored if nothing follows: failed, and the prompt charged. `prices` are those agreed on, by
    class; `leases` the windows of stocks that the request has holds on, and the gateway process whose they are."""

    row: UsageRow
    prices: dict[str, Price]
    leases: list[tuple[WindowId, Unit]]
    replica_id: str
    num_choices: int  # of each prompt

    def cost(self, service_class: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        return self.prices.get(service_class, FREE).cost(prompt_tokens, cached_tokens, output_tokens)

    def charges(self, amounts: Mapping[Unit, int]) -> list[Charge]:
        """Amounts as they are booked."""
        return [Charge(window, self.replica_id, amounts[unit]) for window, unit in self.leases if amounts.get(unit)]


_decoder = msgspec.msgpack.Decoder(BillingContext)


def encode_bill(bill: BillingContext) -> bytes:
    return msgspec.msgpack.encode(bill)


def decode_bill(data: bytes) -> BillingContext:
    """Raises msgspec.MsgspecError for what no release like this one wrote."""
    return _decoder.decode(data)


def request_of(request_id: str) -> str:
    """The request of an answer, from its id at the engine."""
    return request_id.rpartition("-")[0]


def sequence_of(request_id: str) -> int:
    """The number of an answer within its request, from its id at the engine."""
    return int(request_id.rpartition("-")[2])
