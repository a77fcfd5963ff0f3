"""S5, S9, S10 and the ablations: three classes of tenants at twice the capacity."""

from __future__ import annotations

from moiety_engine.scheduling.policies.moiety.tuning import Tuning
from moiety_engine.simulator.devices import A100_LLAMA3_8B
from moiety_engine.simulator.replica import PredictionBias
from moiety_engine.simulator.simulate import SimulationOutcome, simulate
from scenarios.claims import OURS, Ask, Measurement, Scenario, Settings
from scenarios.offers import overloaded_mix, variant

RIVALS = ("fcfs", "strict-priority", "edf", "vtc", "dlpm", "qoserve")
_MIX = "a100-llama3-8b, the tenants of servegen_m_small_1h in priority (0.2 of the demand), standard (0.5), batch (0.3)"


def measure_overload(settings: Settings, seed: int) -> Measurement:
    found = Measurement()
    workload, capacity = overloaded_mix(settings.traces, seed, settings.duration_s)
    for policy in (OURS, *RIVALS):
        outcome = simulate(workload, A100_LLAMA3_8B, policy, capacity=capacity)
        _put_all(found, policy, outcome)
        found.series[policy] = {
            name: {"attainment": row["attainment"], "ttft_s": row["ttft_s"]}
            for name, row in outcome.figures["classes"].items()
        }
    shares = outcome.figures["classes"]
    found.notes.append(
        f"seed {seed}: {len(workload.requests)} requests, "
        + ", ".join(f"{name} {2 * row['demand_share']:.2f} C" for name, row in shares.items())
    )
    return found


def _put_all(found: Measurement, policy: str, outcome: SimulationOutcome) -> None:
    figures = outcome.figures
    for name, row in figures["classes"].items():
        found.put(name, policy, row["attainment"])
    found.put("standard served", policy, figures["classes"]["standard"]["attainment_of_served"])
    found.put("completed", policy, figures["completed_fraction_of_capacity"])
    found.put("goodput", policy, figures["goodput_fraction_of_capacity"])
    found.put("wasted", policy, figures["wasted_prefill_fraction"])
    found.put("gap", policy, figures["longest_service_gap_s"])


ABLATIONS = {
    "moiety without chunk sizing": Tuning(chunk_sizing=False),
    "moiety without demotion": Tuning(demotion=False),
    "moiety without fairness": Tuning(fairness=False),
    "moiety without admission": Tuning(admission=False),
}


def measure_ablations(settings: Settings, seed: int) -> Measurement:
    found = Measurement()
    workload, capacity = overloaded_mix(settings.traces, seed, settings.duration_s)
    for policy in (OURS, *(variant(name, tuning) for name, tuning in ABLATIONS.items())):
        outcome = simulate(workload, A100_LLAMA3_8B, policy, capacity=capacity)
        _put_all(found, policy, outcome)
        found.put("jain", policy, outcome.figures["fairness"]["jain"])
    return found


def measure_hour(settings: Settings, seed: int) -> Measurement:
    found = Measurement()
    workload, capacity = overloaded_mix(settings.traces, seed, settings.hour_s)
    figures = simulate(workload, A100_LLAMA3_8B, OURS, capacity=capacity).figures
    found.put("unfinished", OURS, figures["num_unfinished"])
    found.put("gap", OURS, figures["longest_service_gap_s"])
    found.put("wait", OURS, figures["longest_wait_s"])
    found.put("priority", OURS, figures["classes"]["priority"]["attainment"])
    found.put("goodput", OURS, figures["goodput_fraction_of_capacity"])
    found.put("drain", OURS, figures["end_s"] - settings.hour_s)
    found.notes.append(f"seed {seed}: {figures['num_requests']} requests, {figures['num_completed']} completed")
    return found


WRONG = {
    "lengths × 1.6": PredictionBias(output_length=1.6),
    "lengths × 0.4": PredictionBias(output_length=0.4),
    "step time × 1.1": PredictionBias(step_time=1.1),
    "step time × 0.9": PredictionBias(step_time=0.9),
}


def measure_wrong(settings: Settings, seed: int) -> Measurement:
    found = Measurement()
    workload, capacity = overloaded_mix(settings.traces, seed, settings.duration_s)
    for name, biases in WRONG.items():
        figures = simulate(workload, A100_LLAMA3_8B, OURS, capacity=capacity, biases=biases).figures
        found.put(name, OURS, figures["classes"]["priority"]["attainment"])
        found.put(f"{name}: goodput", OURS, figures["goodput_fraction_of_capacity"])
    return found


_ATTAINED = (
    Ask("standard", "standard: attainment, the rejected in the denominator"),
    Ask("standard served", "standard: attainment of what was served"),
    Ask("batch", "batch: attainment, the rejected in the denominator"),
    Ask("gap", "longest time that a tenant with open requests was not served, s", form="{:.0f}"),
)
S5 = Scenario(
    "S5",
    "Classes at twice the capacity",
    f"{_MIX}, offered 2.0 C over ten minutes; every seed another window of the trace.",
    (
        Ask("priority", "priority: attainment, the rejected in the denominator", at_least=0.99),
        Ask("completed", "completed work ÷ C", at_least=0.95),
        Ask("goodput", "goodput ÷ C", at_least=0.90),
        Ask("wasted", "prefill wasted on the rejected or aborted", at_most=0.02),
        *_ATTAINED,
    ),
    measure_overload,
)
S9 = Scenario(
    "S9",
    "Twice the capacity for an hour",
    f"{_MIX}, offered 2.0 C over an hour, then drained.",
    (
        Ask("unfinished", "admitted requests that did not end", at_most=0, form="{:.0f}"),
        Ask("gap", "longest time that a tenant with open requests was not served, s", at_most=60.0, form="{:.1f}"),
        Ask("wait", "longest wait for the first chunk, s", form="{:.0f}"),
        Ask("drain", "time to drain after the hour, s", form="{:.0f}"),
        Ask("priority", "priority: attainment"),
        Ask("goodput", "goodput ÷ C"),
    ),
    measure_hour,
)
S10 = Scenario(
    "S10",
    "Wrong predictions",
    "S5 with predictions multiplied: of answers' lengths, or of steps' times (whose model then learns nothing of it).",
    tuple(
        ask
        for name in WRONG
        for ask in (
            Ask(name, f"{name}: priority's attainment", at_least=0.98),
            Ask(f"{name}: goodput", f"{name}: goodput ÷ C"),
        )
    ),
    measure_wrong,
)
ABLATION = Scenario(
    "ablation",
    "S5 without parts of the policy",
    f"{_MIX}, offered 2.0 C over ten minutes.",
    (
        Ask("priority", "priority: attainment"),
        Ask("completed", "completed work ÷ C"),
        Ask("goodput", "goodput ÷ C"),
        Ask("wasted", "prefill wasted on the rejected or aborted"),
        *_ATTAINED,
        Ask("jain", "Jain's index of service while backlogged over weight"),
    ),
    measure_ablations,
)
SCENARIOS = (S5, S9, S10, ABLATION)
