"""The model of a step's time learns what prompt tokens cost a step, and the planner's question uses it."""

from __future__ import annotations

import random

import pytest

from moiety_engine.scheduling.step_time.step_time_model import StepShape, StepTimeModel

DECODE_S, ROW_S, PREFILL_S = 0.0005, 0.00001, 0.0012


@pytest.fixture
def learned() -> StepTimeModel:
    """A model that has seen pure decode steps, and steps that prompt tokens make longer by a constant."""
    model, rng = StepTimeModel(), random.Random(0)
    for number in range(400):
        prompt = rng.randint(1, 60) if number % 2 else 0
        shape = StepShape(rng.randint(1, 40), 0, 0, 0)
        if prompt:
            shape = shape.with_prefill(prompt, 0)
        seconds = DECODE_S + ROW_S * (shape.decode_rows + prompt) + (PREFILL_S if prompt else 0)
        model.observe(shape, seconds * rng.uniform(0.95, 1.05))
    return model


def test_a_step_with_a_few_prompt_tokens_is_predicted_with_its_constant_cost(learned: StepTimeModel) -> None:
    decode = StepShape(2, 0, 0, 0)
    assert learned.predict_s(decode) == pytest.approx(DECODE_S + 2 * ROW_S, rel=0.1)
    mixed = decode.with_prefill(2, 0)
    assert learned.predict_s(mixed) == pytest.approx(DECODE_S + 4 * ROW_S + PREFILL_S, rel=0.1)


def test_no_prompt_tokens_join_a_step_whose_time_their_constant_cost_exceeds(learned: StepTimeModel) -> None:
    decode = StepShape(2, 0, 0, 0)
    assert learned.largest_prefill(decode, 0, DECODE_S + PREFILL_S / 2, 64) == 0
    assert 20 < learned.largest_prefill(decode, 0, DECODE_S + PREFILL_S + 40 * ROW_S, 64) < 64


def test_the_cost_is_told_to_others(learned: StepTimeModel) -> None:
    costs = learned.costs()
    assert costs is not None
    assert costs.prefill_step_s == pytest.approx(PREFILL_S, rel=0.1)
