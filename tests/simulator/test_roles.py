"""Devices of two roles: what they do together, and which split of them is recommended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moiety_engine.errors import InvalidConfig
from moiety_engine.simulator.comparison import Scenario
from moiety_engine.simulator.devices import SimulatedDevice
from moiety_engine.simulator.roles import CO_LOCATED, recommend
from moiety_engine.simulator.roles_report import simulate_roles
from moiety_platform.cli.main import main
from moiety_wire.classes import SHIPPED

LONG_PROMPTS = "poisson:rate=5,tenants=6,input=200..900,output=8..24"


@pytest.fixture(scope="module")
def found(small: SimulatedDevice) -> dict[str, Any]:
    device = msgspec.structs.replace(small, kv_tokens=20_000, max_batch_tokens=1024)
    scenario = Scenario(spec=LONG_PROMPTS, duration_s=10.0, load=0.5)
    return simulate_roles(scenario, device, ["moiety"], SHIPPED, 0, num_prefill=3, num_decode=1)


def test_every_request_is_served_once_on_every_split(found: dict[str, Any]) -> None:
    assert set(found["splits"]) == {CO_LOCATED, "1:3", "2:2", "3:1"}
    for figures in found["splits"].values():
        assert figures["num"] == found["num_requests"] > 50
        assert figures["num_completed"] <= figures["num"]
        assert figures["attainment"] <= figures["ttft_attainment"]
    assert found["splits"]["3:1"]["num_completed"] == found["num_requests"]


def test_answers_do_not_wait_for_prompts_of_others(found: dict[str, Any]) -> None:
    both, apart = found["splits"][CO_LOCATED]["tpot_s"], found["splits"]["3:1"]["tpot_s"]
    assert apart["p99"] < 0.6 * both["p99"]
    assert found["tpot_p99_of_co_located"] == pytest.approx(apart["p99"] / both["p99"])


def test_too_few_devices_for_prompts_keep_their_first_tokens_waiting(found: dict[str, Any]) -> None:
    one, three = found["splits"]["1:3"], found["splits"]["3:1"]
    assert one["ttft_s"]["p99"] > 2 * three["ttft_s"]["p99"]
    assert one["attainment"] < three["attainment"]


def test_the_split_that_keeps_most_promises_is_recommended_then_the_quickest_between_tokens() -> None:
    def figures(attainment: float, tpot_p99: float) -> dict[str, Any]:
        return {"attainment": attainment, "tpot_s": {"p99": tpot_p99}}

    splits = {CO_LOCATED: figures(0.99, 0.1), "1:3": figures(0.5, 0.01), "2:2": figures(0.988, 0.03)}
    assert recommend(splits) == "2:2"
    assert recommend({**splits, "3:1": figures(1.0, 0.09)}) == "3:1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_decode": 0}, "set both --prefill and --decode"),
        ({"policies": ["fcfs", "vtc"]}, "set one with --policy"),
    ],
)
def test_incomparable_role_settings_are_refused(small: SimulatedDevice, changes: dict[str, Any], words: str) -> None:
    asked = {"policies": ["fcfs"], "classes": SHIPPED, "seed": 0, "num_prefill": 1, "num_decode": 1, **changes}
    with pytest.raises(InvalidConfig, match=words):
        simulate_roles(Scenario(spec=LONG_PROMPTS, duration_s=2.0), small, **asked)


def test_the_command_tells_the_splits_as_json_and_as_a_table(
    small: SimulatedDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = tmp_path / "device.json"
    device.write_bytes(msgspec.json.encode(small))
    command = ["simulate", "--generate", "poisson:rate=3,input=50..90,output=4..8", "--duration-s", "3"]
    command += ["--device", str(device), "--prefill", "1", "--decode", "1"]
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert set(report["roles"]["splits"]) == {CO_LOCATED, "1:1"}
    assert report["roles"]["recommended"] in report["roles"]["splits"]
    with pytest.raises(SystemExit, match="0"):
        main(command)
    assert "1:1" in capsys.readouterr().out
