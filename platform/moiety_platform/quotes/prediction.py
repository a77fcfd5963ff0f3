"""Prediction of an answer's times from the load that its engine reports. Pure; times are seconds from now.

The engine reports the predicted TTFT of an empty prompt in each class, which contains its queue, and the learned costs
of a step. The prompt is added in steps of the engine's token budget, with the running requests in each; cached prefixes
are unknown here, so the prediction is for a prompt without any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moiety_platform.quotes.timing import Timing
from moiety_wire.engine_load import ClassLoad, Load, StepCosts

GRACE_S = 0.25  # of each guarantee, for what no load report contains


def predict_timing(
    load: Load, class_load: ClassLoad | None, prompt_lengths: Sequence[int], num_sequences: int
) -> Timing | None:
    """Return the predicted times, or None if the engine reports no step costs.

    `class_load` is None where the engine has not served the class, so nothing waits in it.
    """
    costs = load.step_costs
    if costs is None:
        return None
    waits_s = 0.0 if class_load is None else class_load.predicted_ttft_s
    context_tokens = load.kv_blocks_used * load.block_size
    context_s = costs.context_token_s * context_tokens
    prefill_s = _prefill_s(costs, load, prompt_lengths, context_s)
    decoded_context_s = context_s + costs.context_token_s * sum(prompt_lengths)
    token_s = _step_s(costs, load.num_running + num_sequences) + decoded_context_s
    return Timing(waits_s + prefill_s, token_s)


def guarantee_of(prediction: Timing, margin: float) -> Timing:
    """Return the times to guarantee: the predicted ones with a margin, such as 0.5 for half as much again."""
    factor = 1 + margin
    return Timing(prediction.first_token_s * factor + GRACE_S, prediction.token_s * factor)


def expected_output_tokens(loads: Sequence[Load], most: int) -> int:
    """Return the mean output length of the engines' requests so far, at most `most`, and `most` before the first."""
    num_requests = sum(load.requests_total for load in loads)
    num_tokens = sum(load.output_tokens_total for load in loads)
    return min(most, max(1, math.ceil(num_tokens / num_requests))) if num_requests and num_tokens else most


def _prefill_s(costs: StepCosts, load: Load, prompt_lengths: Sequence[int], context_s: float) -> float:
    num_tokens = sum(prompt_lengths)
    budget = max(1, load.max_batch_tokens - load.num_running) if load.max_batch_tokens else max(1, num_tokens)
    num_steps = math.ceil(num_tokens / budget)
    rows = load.num_running + min(num_tokens, budget)
    pairs = sum(length * length / 2 for length in prompt_lengths)
    return num_steps * (_step_s(costs, rows) + costs.prefill_step_s + context_s) + pairs * costs.pair_s


def _step_s(costs: StepCosts, rows: int) -> float:
    extra_s = sum(max(0, rows - bend) * more_s for bend, more_s in costs.bends)
    return costs.step_s + rows * costs.row_s + extra_s
