"""Capacity, load and the fields of the report; the comparison of policies; the command."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from moiety_engine.errors import InvalidConfig
from moiety_engine.simulator.capacity import Capacity, at_load, measure_capacity
from moiety_engine.simulator.comparison import Scenario, compare, read_classes
from moiety_engine.simulator.devices import SimulatedDevice
from moiety_engine.simulator.simulate import simulate
from moiety_engine.simulator.work import WorkModel
from moiety_wire.classes import PRIORITY
from moiety_workload.generators import generate
from moiety_workload.request import Workload

from .conftest import run_command

SPEC = "poisson:rate=4,tenants=6,input=16..200,output=4..60"
FIELDS = {
    "classes", "goodput_fraction_of_capacity", "completed_fraction_of_capacity", "throughput_tokens_per_s",
    "wasted_prefill_fraction", "recomputed_fraction", "max_preemptions", "longest_wait_s", "fairness", "rejections",
    "longest_service_gap_s", "tenants",
}  # fmt: skip
CLASS_FIELDS = {"attainment", "demand_share", "ttft_s", "tpot_s", "queue_s", "num"}
FAIRNESS_FIELDS = {"max_gap", "bound", "window_max", "window_mean", "jain"}


def test_a_saturated_device_does_about_a_second_of_work_a_second(capacity: Capacity) -> None:
    assert 0.8 < capacity.work_per_s < 1.2


def test_cheap_prompts_earn_little_beside_decoding(base: Workload, small: SimulatedDevice) -> None:
    model = WorkModel.of(small, base.requests)
    assert model.prompt_s == pytest.approx(small.token_s, rel=0.5)
    assert model.output_s > 3 * model.prompt_s
    assert model.seconds(100, 100, 50) > model.seconds(100, 100, 0) + model.seconds(100, 0, 49)


@pytest.fixture(scope="module")
def base() -> Workload:
    return generate(SPEC, 60.0, 0)


@pytest.fixture(scope="module")
def capacity(base: Workload, small: SimulatedDevice) -> Capacity:
    return measure_capacity(base, small, run_s=60.0)


@pytest.mark.parametrize("load", [0.5, pytest.param(2.0, marks=pytest.mark.thorough)])
def test_fcfs_completes_what_is_offered_up_to_the_capacity(
    load: float, base: Workload, capacity: Capacity, small: SimulatedDevice
) -> None:
    figures = simulate(at_load(base, capacity, load, 0), small, capacity=capacity).figures
    assert figures["offered_fraction_of_capacity"] == pytest.approx(load, rel=0.03)
    assert figures["completed_fraction_of_capacity"] == pytest.approx(min(1.0, load), abs=0.08)
    assert figures["goodput_fraction_of_capacity"] <= figures["completed_fraction_of_capacity"] + 1e-9


def test_the_report_has_the_fields_that_checks_read(small: SimulatedDevice) -> None:
    scenario = Scenario(spec=SPEC, duration_s=20.0, load=0.8, shares={"priority": 0.3, "standard": 0.7})
    done = compare(scenario, small, ["fcfs"])
    figures = done.policies["fcfs"]
    assert set(figures) >= FIELDS
    assert set(figures["fairness"]) >= FAIRNESS_FIELDS
    assert set(figures["classes"]) == {"priority", "standard"}
    for row in figures["classes"].values():
        assert set(row) >= CLASS_FIELDS and set(row["ttft_s"]) == {"p50", "p90", "p99"}
        assert 0 <= row["attainment"] <= 1
    assert sum(row["demand_share"] for row in figures["classes"].values()) == pytest.approx(1)
    assert figures["classes"]["priority"]["demand_share"] == pytest.approx(0.3, abs=0.1)
    assert figures["num_requests"] == figures["num_completed"] == done.num_requests
    service = figures["tenants"]["tenant-000"]["service"]
    assert len(service) == 60 and service == sorted(service) and service[-1] > 0


def test_rejected_requests_stay_in_the_denominator_and_are_counted_by_reason(
    capacity: Capacity, small: SimulatedDevice
) -> None:
    workload = generate("constant:rate=1,input=64,output=4;constant:rate=1,input=3000,output=4", 20.0, 0)
    outcome = simulate(workload, small, capacity=capacity)
    row = outcome.figures["classes"]["standard"]
    assert outcome.figures["rejections"] == {"context_length_exceeded": 20}
    assert row["attainment"] == 0.5 and row["attainment_of_served"] == 1.0


def test_several_seeds_give_means_and_each_seeds_own_figures(small: SimulatedDevice) -> None:
    done = compare(Scenario(spec=SPEC, duration_s=10.0), small, ["fcfs"], seeds=[0, 1])
    figures = done.policies["fcfs"]
    own = figures["per_seed"]
    assert set(own) == {"0", "1"}
    assert figures["throughput_tokens_per_s"] == pytest.approx(
        (own["0"]["throughput_tokens_per_s"] + own["1"]["throughput_tokens_per_s"]) / 2
    )
    assert figures["longest_wait_s"] == max(own["0"]["longest_wait_s"], own["1"]["longest_wait_s"])


def test_a_class_that_nobody_described_is_refused(small: SimulatedDevice) -> None:
    with pytest.raises(InvalidConfig, match="requests of class gold, which is not among priority"):
        simulate(generate("constant:rate=1,class=gold", 5.0, 0), small)


def test_classes_are_changed_and_added_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "classes.toml"
    path.write_text("[priority]\nttft_s = 1.5\n\n[gold]\nrank = 0\ncompletion_s = 60.0\n")
    classes = {service.name: service for service in read_classes(path)}
    assert classes["priority"] == msgspec.structs.replace(PRIORITY, ttft_s=1.5)
    assert classes["gold"].completion_s == 60.0 and "batch" in classes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[priority]\nttft = 1.5\n", "no setting ttft"),
        ("[priority]\nttft_s = -1.0\n", "ttft_s must be above 0"),
        ("[gold]\nttft_s = 1.0\n", "required field `rank`"),
        ("priority = 3\n", "must be a table"),
        ("[priority\n", "cannot read the classes"),
    ],
)
def test_classes_that_are_none_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "classes.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=message):
        read_classes(path)


def test_the_command_reports_one_json_object_and_draws(
    tmp_path: Path, small: SimulatedDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    device, plot = tmp_path / "device.json", tmp_path / "plot.png"
    device.write_bytes(msgspec.json.encode(small))
    trace = tmp_path / "trace.csv"
    rows = [f"{index * 0.1},{'ab'[index % 2]},40,8" for index in range(100)]
    trace.write_text("\n".join(["arrival_s,tenant,input_tokens,output_tokens", *rows]))
    arguments = ["--trace", trace, "--device", device, "--policy", "fcfs", "--load", "0.5", "--duration-s", "10"]
    assert run_command("simulate", *arguments, "--classes", "standard=0.5,batch=0.5", "--plot", plot, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) >= {"environment", "settings", "capacity", "policies"}
    assert report["settings"]["trace"] == "trace.csv" and report["environment"]["python"]
    assert set(report["policies"]["fcfs"]["classes"]) == {"standard", "batch"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert run_command("simulate", *arguments) == 0
    assert "goodput" in capsys.readouterr().out


def test_a_replica_gets_its_share_of_so_many_times_what_arrives(small: SimulatedDevice) -> None:
    def offered(times: float, replicas: int) -> float:
        scenario = Scenario(spec=SPEC, duration_s=30.0, times=times, num_replicas=replicas)
        figures = compare(scenario, small, ["fcfs"]).policies["fcfs"]
        return float(figures["offered_fraction_of_capacity"])

    once = offered(1.0, 1)
    assert offered(3.0, 2) == pytest.approx(1.5 * once, rel=0.05)
    assert offered(2.0, 2) == once


def test_a_json_file_of_classes_takes_a_promise_away_by_null(tmp_path: Path) -> None:
    path = tmp_path / "classes.json"
    path.write_text('{"priority": {"tpot_s": null, "ttft_s": 0.25}}')
    found = {service.name: service for service in read_classes(path)}
    assert (found["priority"].ttft_s, found["priority"].tpot_s) == (0.25, None)
    path.write_text("{")
    with pytest.raises(InvalidConfig, match=r"cannot read the classes"):
        read_classes(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either a trace or a generator"),
        (["--generate", "poisson:rate=1", "--policy", "lottery"], "policy 'lottery' is not known; known are"),
        (["--generate", "poisson:rate=1", "--device", "abacus"], "neither a preset"),
        (["--generate", "poisson:rate=1", "--plot", "x.gif"], "--plot must name a .png or .html file"),
        (["--generate", "poisson"], "lacks rate"),
        (["--generate", "poisson:rate=1", "--load", "1", "--replicas", "2"], "set either --load"),
        (["--generate", "poisson:rate=1", "--weights", "a"], "not TENANT=WEIGHT"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("simulate", *arguments) == 1
    assert message in " ".join(capsys.readouterr().err.split())
