"""The constants of our own policy, and switches that take a part of it away for comparison."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Parts are fractions of what the comment says."""

    chunk_sizing: bool = True
    demotion: bool = True
    fairness: bool = True
    admission: bool = True
    # a step
    slack_used: float = 0.35  # of the time until the next token is due
    slack_used_if_urgent: float = 0.5  # the same, while prompts of the best rank are at risk
    step_range_s: tuple[float, float] = (0.15, 0.4)  # of the longest step; but decoding alone may take half of one
    unpromised_step_s: float = 1.0  # the longest step while nobody was promised a first token or a pace of late
    ttft_part: float = 0.06  # of the shortest TTFT promised of late, that a step may take within that range
    tight_ttft_part: float = 0.3  # of the best rank's shortest TTFT, that any step may take
    decode_part: float = 0.75  # of the shortest pace promised of late, that decoding alone may take
    least_decode_part: float = 0.0625  # of worse ranks' decodes, that are in every step while their tokens are due
    unpromised_token_s: float = 0.25  # after its newest token, when a request without a pace wants its next
    decode_part_beyond_share: float = 0.21  # of its own pace, beyond its share of places while others are there
    floor_tokens: int = 16  # prompt tokens a step whatever the slack
    steps_of_floor: int = 8  # one in so many has it for worse ranks, while those are held to the best rank's pace
    remembered_s: float = 30.0  # for how long a class that was seen is reckoned with
    # the queue
    risk_factor: float = 2.0  # at risk when this many times the predicted need is left
    length_margin: float = 3.0  # of an answer's expected length, for which there must be time before the end promised
    blend: float = 300.0  # under load, seconds that a deadline moves for each second of work left
    mixed_blend: tuple[float, float] = (0.0, 1200.0)  # the same in ranks of mixed promises, from here
    mixed_excess: tuple[float, float] = (0.4, 0.6)  # to there while what is due exceeds what can be done by so much
    loaded_s: float = 10.0  # predicted wait at which that holds in full, and ranks of mixed promises go by it alone
    boost_part: float = 0.02  # of the time, for those who waited too long
    lane_saved_s: float = 0.1  # the most of that time that may be saved for later
    nearly_done_steps: float = 2.0  # who has begun and needs no more goes before those who have not
    hungry_s: float = 20.0  # a tenant that waits and was not served for so long
    max_overtaken: int = 32  # joins of others that a request puts up with while it finds no blocks
    # blocks
    preemption_part: float = (
        0.035  # of the time, that giving way for want of blocks may cost; overcommitment follows it
    )
    overcommit_range: tuple[float, float] = (0.85, 1.5)  # of all blocks, that the batch may be predicted to want
    sharing_part: float = 0.02  # of the time, for taking blocks from tenants that hold more than their share
    reclaims_up_to: float = 0.5  # of its share of blocks, that a tenant may reach by taking from those above theirs
    waits_for_itself_at: float = 1.35  # of its share, from which a tenant that finds no blocks holds nobody else up
    max_preemptions: int = 2
    reserve_quantile: float = 0.95  # of a tenant's answers, whose length a protected request reserves
    # money and admission
    prepaid: float = 0.5  # of an answer's expected length, charged when it starts
    burst_s: float = 3.0  # of the rank's whole service, that a tenant keeps as credit while it has nothing waiting
    ttft_margin: float = 0.6  # of the TTFT promised, up to which a request is let in
    ttft_margin_of_best: float = 0.9  # the same for the best rank, which nothing delays
    wait_unasked: float = 0.4  # of the TTFT promised, that may be waited where the prompt alone takes too long
    tenant_queue: float = 2.0  # of the places left in the queue, that a tenant's requests may already have
