"""Constants of the `moiety` policy, with switches that disable parts of it for comparisons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the policy. The comments name the quantity of which a field is a fraction."""

    chunk_sizing: bool = True
    demotion: bool = True
    fairness: bool = True
    admission: bool = True
    # a step
    slack_used: float = 0.35  # of the time until the next deadline
    slack_used_if_urgent: float = 0.5  # the same, while prompts of the best rank are at risk
    step_range_s: tuple[float, float] = (0.15, 0.4)  # range of the longest step; decoding alone may take half of a step
    no_slo_step_s: float = 1.0  # longest step while no recent class has a TTFT or TPOT target
    ttft_part: float = 0.06  # of the shortest recent TTFT target: longest step within that range
    tight_ttft_part: float = 0.3  # of the best rank's shortest TTFT target: limit of any step
    decode_part: float = 0.75  # of the shortest recent TPOT target: limit of decoding alone
    least_decode_part: float = 0.0625  # of worse ranks' decodes: included in every step while their tokens are due
    no_slo_token_s: float = 0.25  # after its newest token, when a request without a TPOT target is due
    decode_part_beyond_share: float = 0.21  # of its own TPOT target: limit beyond its share of slots while others wait
    floor_tokens: int = 16  # prompt tokens per step regardless of the slack
    spot_part: float = 1.5  # of a step with only the rows of other classes: longest step with all spot rows
    steps_of_floor: int = 8  # one of so many steps has the floor for worse ranks held to the best rank's pace
    remembered_s: float = 30.0  # how long a class counts after its last request
    # the queue
    risk_factor: float = 2.0  # at risk when less than this multiple of the predicted need is left
    length_margin: float = 3.0  # multiple of the expected output length that must fit before a completion deadline
    blend: float = 300.0  # under load: seconds that a deadline moves for each second of remaining work
    mixed_blend: tuple[float, float] = (0.0, 1200.0)  # the same in ranks with mixed targets, from the first value
    mixed_excess: tuple[float, float] = (0.4, 0.6)  # to the second while demand exceeds service by these fractions
    loaded_s: float = 10.0  # predicted wait at which `blend` applies in full, and alone in ranks with mixed targets
    boost_part: float = 0.02  # of the time: for requests that waited too long
    lane_saved_s: float = 0.1  # largest amount of that time that may be saved for later
    nearly_done_steps: float = 2.0  # started requests that need no more go before those that have not started
    starved_s: float = 20.0  # a waiting tenant without service for this long gets boosted
    max_overtaken: int = 32  # joins of others that a request tolerates while it lacks blocks
    # blocks
    preemption_part: float = 0.035  # of the time: allowed cost of preemptions for blocks; controls overcommitment
    overcommit_range: tuple[float, float] = (0.85, 1.5)  # of all blocks: allowed predicted demand of the batch
    sharing_part: float = 0.02  # of the time: for taking blocks from tenants above their share
    reclaims_up_to: float = 0.5  # of its share of blocks: what a tenant may reach by taking from those above theirs
    waits_for_itself_at: float = 1.35  # of its share: above it, a tenant without blocks does not hold up others
    max_preemptions: int = 2
    reserve_quantile: float = 0.95  # of a tenant's outputs, whose length a protected request reserves
    # accounting and admission
    prepaid: float = 0.5  # of the expected output length, charged at the start
    burst_s: float = 3.0  # of the rank's whole service: a tenant's credit while it has no waiting requests
    ttft_margin: float = 0.6  # of the TTFT target: largest prediction that is admitted
    ttft_margin_of_best: float = 0.9  # the same for the best rank, which no other rank delays
    wait_unasked: float = 0.4  # of the TTFT target: acceptable wait if the prompt alone takes too long
    tenant_queue: float = 2.0  # of the remaining queue slots: how many a tenant's requests may already have
