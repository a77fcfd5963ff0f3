"""Measurements of a real loop become a device of the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from moiety_engine.bench.calibration import calibrate, fit_non_negative
from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import EngineConfig
from moiety_engine.simulator.simulate import simulate
from moiety_workload.generators import generate


def test_the_fit_finds_the_coefficients_that_made_the_data() -> None:
    rng = np.random.default_rng(0)
    terms = rng.uniform(0, 100, size=(60, 4))
    truth = np.array([0.004, 0.0, 0.2, 0.01])
    found = fit_non_negative(terms / (terms @ truth)[:, None])
    assert found == pytest.approx(truth, rel=1e-6, abs=1e-9)


def test_the_fit_holds_at_zero_what_would_be_negative() -> None:
    terms = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert fit_non_negative(terms / np.array([3.0, 2.0, 1.0])[:, None])[1] == 0.0


def test_a_real_engine_becomes_a_device_to_simulate() -> None:
    config = EngineConfig(
        model=str(resolve_checkpoint("")),
        name="demo",
        device="cpu",
        dtype="float32",
        max_running=4,
        max_batch_tokens=64,
        max_context_tokens=128,
        num_threads=1,
    )
    seen: list[tuple[int, int]] = []
    device = calibrate(
        config, limit_s=60, seed=0, on_load=lambda *_: None, on_trial=lambda done, total: seen.append((done, total))
    )
    assert seen[-1][0] == seen[-1][1] > 5
    # where others compute too, what more tokens cost may be lost in the noise of so small a model
    assert device.step_s(64, 1, 0, 64 * 32) >= device.step_s(8, 1, 0, 8 * 4) > 0
    assert device.fit_error is not None and device.max_batch_tokens == 64 and device.kv_token_bytes > 0
    outcome = simulate(generate("poisson:rate=5,input=32,output=8", 5.0, 0), device)
    assert all(record.completed for record in outcome.run.records)
