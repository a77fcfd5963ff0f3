"""Request and response bodies of the admin API for contract checks."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec

from moiety_platform.contracts.arrivals import BURST_FACTOR, ContractTerms
from moiety_platform.contracts.check import ContractRun, Verdict
from moiety_platform.openapi.schemas import shows
from moiety_workload.simulations import DEVICES

MAX_RATE = 1e6
MAX_LENGTH = 10_000_000
MAX_TOKENS = 10**12
MAX_WEIGHT = 1000.0
MIN_AMOUNT = 0.001
MAX_HOURS = 744.0
MIN_HOURS = 0.01
MIN_WINDOW_S, MAX_WINDOW_S = 60.0, 36_000.0
MAX_REPLICAS = 1000
MAX_BURST_FACTOR = 10.0

Length = Annotated[int, shows(minimum=1, maximum=MAX_LENGTH)]
Replicas = Annotated[int, shows(minimum=1, maximum=MAX_REPLICAS)]


class NewContractCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contract of a tenant that does not exist yet, and the recent traffic beside which it is simulated.

    `copy_tenant_id` takes the weight, the limits per minute and the lengths of an existing tenant where they are not
    given; without it, lengths that are not given are those of the recent traffic. The busiest `window_s` seconds of the
    last `hours` are simulated, with the step times of the engine `engine_id`, or of the preset `device`; if both are
    left out, with those of a running engine. `replicas` are the healthy engines if they are not given; up to
    `max_replicas` are tried. `required` is the SLO attainment to reach. An accepted tenant is simulated again with
    `burst_factor` times the recent requests; 1 leaves this out.
    """

    service_class: str = "standard"
    requests_per_minute: Annotated[float, shows(minimum=MIN_AMOUNT, maximum=MAX_RATE)] | None = None
    tokens_per_minute: Annotated[int, shows(minimum=1, maximum=MAX_TOKENS)] | None = None
    input_tokens: Length | None = None
    output_tokens: Length | None = None
    weight: Annotated[float, shows(minimum=MIN_AMOUNT, maximum=MAX_WEIGHT)] | None = None
    copy_tenant_id: str | None = None
    model: str | None = None
    hours: Annotated[float, shows(minimum=MIN_HOURS, maximum=MAX_HOURS)] = 168.0
    window_s: Annotated[float, shows(minimum=MIN_WINDOW_S, maximum=MAX_WINDOW_S)] = 1800.0
    replicas: Replicas | None = None
    max_replicas: Replicas = 16
    required: Annotated[float, shows(minimum=0, maximum=1)] = 0.99
    burst_factor: Annotated[float, shows(minimum=1, maximum=MAX_BURST_FACTOR)] = BURST_FACTOR
    device: Annotated[str, shows(enum=list(DEVICES))] | None = None
    engine_id: str | None = None
    seed: int = 0


class ContractCheckView(msgspec.Struct, frozen=True):
    """Result of a contract check: `done`, or `failed` with the reason in `problem` and the runs until then.

    `verdict` is `accepted`, `needs_more` or `refused`. `replicas_needed` carry the tenant in its class; in `classes`,
    which are lower, it needs no further replica. `before` is the attainment of each class without the tenant. `missed`
    of a run are the classes whose SLO it breaks, and `contract` for the new tenant itself. `burst` is the run of an
    accepted tenant with `burst_factor` times the recent requests.
    """

    state: str
    problem: str | None
    verdict: Verdict | None
    terms: ContractTerms
    device: str
    required: float
    window_s: float
    window_since: datetime | None  # null if there was no recent traffic
    num_requests: int  # of the recent traffic
    num_contract_requests: int
    replicas: int
    replicas_needed: int | None
    classes: list[str]
    before: dict[str, float]
    runs: list[ContractRun]
    burst_factor: float
    burst: ContractRun | None
