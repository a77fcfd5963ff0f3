"""Rows of an export in the columns of FOCUS 1.2, the FinOps Open Cost and Usage Specification. Pure.

A tenant is a billing account, a project a sub account, and a key a resource. Costs are US dollars with nine decimals,
so they are exact. A row is the usage of one day by tenant, project, key, model and class; credits are rows of their own
with a negative cost, so the sum of `BilledCost` is what the ledger bills.
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
}
"""Kind of each column, in the order of the file. Those with `x_` are our own."""

PROVIDER = "Moiety"


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


def rows_of(day: datetime, usage: Iterable[DayUsage], names: Mapping[str, str]) -> Iterator[dict[str, Value]]:
    """Yield the rows of a day. `names` are those of tenants, projects and keys by id, as far as they still exist."""
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
        }
        yield _row(day, one, before, amounts, names)
        if one.credit_nanodollars:
            credit: dict[str, Value] = {
                "ChargeCategory": "Credit",
                "ChargeDescription": f"Credits for missed guarantees of {one.model} in the class {one.service_class}",
            }
            yield _row(day, one, -one.credit_nanodollars, credit, names)


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
