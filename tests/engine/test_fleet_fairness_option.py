"""The option --fleet-fairness: which engines exchange the service of tenants, and which refuse to."""

from __future__ import annotations

from typing import Any

import pytest

from moiety_engine.config import EngineConfig, FleetFairness, PolicyName
from moiety_engine.errors import InvalidConfig
from moiety_engine.scheduler_setup import _exchanges_service
from moiety_wire.engine_choices import Batching


def _config(**settings: Any) -> EngineConfig:
    return EngineConfig(model="tiny", name="tiny", **settings)


@pytest.mark.parametrize("policy", list(PolicyName))
def test_auto_exchanges_with_the_policies_that_have_counters(policy: PolicyName) -> None:
    has_counters = policy in (PolicyName.MOIETY, PolicyName.VTC, PolicyName.DLPM)
    assert _exchanges_service(_config(policy=policy), policy) is has_counters


def test_off_exchanges_nothing() -> None:
    assert not _exchanges_service(_config(fleet_fairness=FleetFairness.OFF), PolicyName.MOIETY)


def test_on_is_refused_without_counters_and_says_what_to_choose() -> None:
    config = _config(fleet_fairness=FleetFairness.ON, policy=PolicyName.MOIETY, batching=Batching.STATIC)
    with pytest.raises(InvalidConfig, match="fcfs under static batching: choose one of them"):
        _exchanges_service(config, PolicyName.FCFS)
