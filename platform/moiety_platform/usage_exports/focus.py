"""Rows of an export in the columns of FOCUS 1.2, the FinOps Open Cost and Usage Specification. Pure.

A tenant is a billing account, a project a sub account, and a key a resource. Costs are US dollars with nine decimals,
so they are exact. A row is the usage of one day by tenant, project, key, model and class; credits are rows of their
own by reason, with a negative cost, so the sum of `BilledCost` is what the ledger bills.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum

from moiety_platform.quota.kinds import NANO, Period, window_end, window_start
from moiety_platform.usage.days import DAY

Value = str | int | Decimal | datetime | None


class ColumnKind(StrEnum):
    TEXT = "text"
    NUMBER = "number"  # a whole number
    COST = "cost"  # US dollars, nine decimals
    TIME = "time"


_TEXT, _NUMBER, _COST, _TIME = ColumnKind.TEXT, ColumnKind.NUMBER, ColumnKind.COST, ColumnKind.TIME
COLUMNS: Mapping[str, ColumnKind] = {
    "BilledCost": _COST,
    "BillingAccountId": _TEXT,
    "BillingAccountName": _TEXT,
    "BillingAccountType": _TEXT,
    "BillingCurrency": _TEXT,
    "BillingPeriodEnd": _TIME,
    "BillingPeriodStart": _TIME,
    "ChargeCategory": _TEXT,
    "ChargeClass": _TEXT,
    "ChargeDescription": _TEXT,
    "ChargeFrequency": _TEXT,
    "ChargePeriodEnd": _TIME,
    "ChargePeriodStart": _TIME,
    "ConsumedQuantity": _NUMBER,
    "ConsumedUnit": _TEXT,
    "ContractedCost": _COST,
    "EffectiveCost": _COST,
    "InvoiceIssuerName": _TEXT,
    "ListCost": _COST,
    "PricingQuantity": _NUMBER,
    "PricingUnit": _TEXT,
    "ProviderName": _TEXT,
    "PublisherName": _TEXT,
    "RegionId": _TEXT,
    "ResourceId": _TEXT,
    "ResourceName": _TEXT,
    "ResourceType": _TEXT,
    "ServiceCategory": _TEXT,
    "ServiceName": _TEXT,
    "ServiceSubcategory": _TEXT,
    "SkuId": _TEXT,
    "SubAccountId": _TEXT,
    "SubAccountName": _TEXT,
    "SubAccountType": _TEXT,
    "x_Model": _TEXT,
    "x_ServiceClass": _TEXT,
    "x_Requests": _NUMBER,
    "x_PromptTokens": _NUMBER,
    "x_CachedTokens": _NUMBER,
    "x_OutputTokens": _NUMBER,
    "x_SpeculativeTokens": _NUMBER,
    "x_SloRequests": _NUMBER,
    "x_SloAttained": _NUMBER,
    "x_Guarantees": _NUMBER,
    "x_GuaranteesMet": _NUMBER,
    "x_CreditReason": _TEXT,
}
"""Kind of each column, in the order of the file. Those with `x_` are our own."""

PROVIDER = "Moiety"
CREDIT_TEXTS = {"ttft": "a first token came late", "finish": "a last token came late", "failed": "an answer broke off"}

UsageKeys = tuple[str, str, str, str, str]
"""Tenant, project, key, model and class."""

CreditsByKeys = Mapping[UsageKeys, Mapping[str, int]]
"""Nano-dollars credited, by reason."""


@dataclass(frozen=True, slots=True)
class DayUsage:
    """Usage of one day by tenant, project, key, model and class; costs are nano-dollars, after credits."""

    tenant_id: str
    project_id: str
    key_id: str
    model: str
    service_class: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    speculative_tokens: int
    cost_nanodollars: int
    credit_nanodollars: int
    num_slo_requests: int
    num_slo_attained: int
    num_guarantees: int
    num_guarantees_met: int

    @property
    def keys(self) -> UsageKeys:
        """The ids and names by which usage is summed."""
        return (self.tenant_id, self.project_id, self.key_id, self.model, self.service_class)


def rows_of(
    day: datetime, usage: Iterable[DayUsage], names: Mapping[str, str], credits_by_keys: CreditsByKeys
) -> Iterator[dict[str, Value]]:
    """Yield the rows of a day.

    `names` are those of tenants, projects and keys by id, as far as they still exist. `credits_by_keys` are the credits
    of the day's requests, as far as their rows are kept.
    """
    for one in usage:
        before = one.cost_nanodollars + one.credit_nanodollars
        tokens = one.prompt_tokens + one.output_tokens + one.speculative_tokens
        amounts: dict[str, Value] = {
            "ChargeCategory": "Usage",
            "ChargeDescription": f"Tokens of {one.model or 'no model'} in the class {one.service_class}",
            "ConsumedQuantity": tokens,
            "ConsumedUnit": "Tokens",
            "PricingQuantity": tokens,
            "PricingUnit": "Tokens",
            "x_Requests": one.requests,
            "x_PromptTokens": one.prompt_tokens,
            "x_CachedTokens": one.cached_tokens,
            "x_OutputTokens": one.output_tokens,
            "x_SpeculativeTokens": one.speculative_tokens,
            "x_SloRequests": one.num_slo_requests,
            "x_SloAttained": one.num_slo_attained,
            "x_Guarantees": one.num_guarantees,
            "x_GuaranteesMet": one.num_guarantees_met,
        }
        yield _row(day, one, before, amounts, names)
        for reason, nanodollars in _credits_of(one, credits_by_keys.get(one.keys, {})):
            credit: dict[str, Value] = {
                "ChargeCategory": "Credit",
                "ChargeDescription": f"Credits for missed guarantees of {one.model} in the class {one.service_class}"
                + ("" if reason is None else f": {CREDIT_TEXTS.get(reason, reason)}"),
                "x_CreditReason": reason,
            }
            yield _row(day, one, -nanodollars, credit, names)


def _credits_of(usage: DayUsage, by_reason: Mapping[str, int]) -> list[tuple[str | None, int]]:
    """Return the credits by reason, with the rest under None; their sum is exactly that of the usage."""
    rest = usage.credit_nanodollars - sum(by_reason.values())
    if rest < 0:  # of the rows, one was added after the sums were made
        return [(None, usage.credit_nanodollars)] if usage.credit_nanodollars else []
    known: list[tuple[str | None, int]] = [(reason, by_reason[reason]) for reason in sorted(by_reason)]
    return [*known, (None, rest)] if rest else known


def _row(
    day: datetime, usage: DayUsage, nanodollars: int, more: Mapping[str, Value], names: Mapping[str, str]
) -> dict[str, Value]:
    month = window_start(Period.MONTH, day)
    cost = (Decimal(nanodollars) / NANO).quantize(Decimal("1e-9"))
    row: dict[str, Value] = dict.fromkeys(COLUMNS)
    row |= dict.fromkeys((name for name, kind in COLUMNS.items() if kind is ColumnKind.COST), cost)
    row |= dict.fromkeys(("InvoiceIssuerName", "ProviderName", "PublisherName"), PROVIDER)
    row |= {
        "BillingAccountId": usage.tenant_id,
        "BillingAccountName": names.get(usage.tenant_id),
        "BillingAccountType": "Tenant",
        "BillingCurrency": "USD",
        "BillingPeriodStart": month,
        "BillingPeriodEnd": window_end(Period.MONTH, month),
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": day,
        "ChargePeriodEnd": day + DAY,
        "ResourceId": usage.key_id,
        "ResourceName": names.get(usage.key_id),
        "ResourceType": "API key",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Inference",
        "ServiceSubcategory": "Generative AI",
        "SkuId": f"{usage.model}/{usage.service_class}",
        "SubAccountId": usage.project_id,
        "SubAccountName": names.get(usage.project_id),
        "SubAccountType": "Project",
        "x_Model": usage.model,
        "x_ServiceClass": usage.service_class,
    }
    row.update(more)
    return row
