"""Predicted output lengths: the quantile of a tenant's outputs."""

from __future__ import annotations

import random

from moiety_engine.scheduling.outputs.output_predictor import OutputPredictor


def test_a_quantile_is_the_same_however_often_it_was_asked_for() -> None:
    rng, often, once = random.Random(0), OutputPredictor(), OutputPredictor()
    for _ in range(300):
        tenant, length = rng.choice("abc"), rng.randrange(1, 2000)
        often.learn(tenant, length)
        once.learn(tenant, length)
        asked = [(rng.choice("abcd"), rng.choice((0.5, 0.95)), rng.randrange(1, 3000)) for _ in range(3)]
        for name, quantile, at_most in (*asked, *asked[:1]):
            found = often.high(name, quantile, at_most=at_most)
            assert found == often.high(name, quantile, at_most=at_most) <= at_most
        assert found == once.high(name, quantile, at_most=at_most)


def test_a_quantile_covers_outputs_that_ended_since_it_was_asked_for() -> None:
    lengths = OutputPredictor()
    assert lengths.high("a", 0.95, at_most=10_000) == 512
    for _ in range(50):
        lengths.learn("a", 3000)
    assert 3000 <= lengths.high("a", 0.95, at_most=10_000) < 4000
    assert lengths.high("a", 0.95, at_most=100) == 100
