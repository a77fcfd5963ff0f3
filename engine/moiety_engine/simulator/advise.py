"""The command `moiety advise`: reads a trace or a gateway's usage; prints sentences or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from moiety_engine.command_errors import exit_on_error
from moiety_engine.errors import InvalidConfig
from moiety_engine.simulator.advice import KV_FULL, KV_LOW, SAFE_SHARE, Advice, Advisor
from moiety_engine.simulator.bounds import REQUIRED_ATTAINMENT, ClassBounds
from moiety_engine.simulator.comparison import read_classes
from moiety_engine.simulator.devices import SimulatedDevice, find_device
from moiety_engine.simulator.options import AsJson, ClassShares, ClassTargets, DeviceName, Seed, TraceFile
from moiety_engine.simulator.replica import check_policy
from moiety_engine.simulator.usage_rows import read_usage
from moiety_engine.simulator.work import WorkModel
from moiety_kernels.environment import describe_environment
from moiety_wire.classes import SHIPPED
from moiety_workload.errors import WorkloadError
from moiety_workload.readers import load_workload
from moiety_workload.request import Workload
from moiety_workload.tenants import assign_classes, parse_shares

_LOW_SATURATION = 0.6  # of C; below it bursts, not the load, break SLOs
_NUM_ENOUGH = 200  # requests of a class; with fewer, its p99 is a guess


def advise_command(
    trace: TraceFile = None,
    usage: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File with the output of moiety usage --requests 500 --json."),
    ] = None,
    device: DeviceName = "a10g-llama2-7b",
    classes: ClassShares = None,
    class_targets: ClassTargets = None,
    policy: Annotated[str, typer.Option(help="Scheduling policy.")] = "moiety",
    duration_s: Annotated[
        float, typer.Option(min=10, help="Duration of the busiest part of the trace to simulate, in seconds.")
    ] = 300.0,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Recommend settings and a number of replicas for a load, from the capacity of one replica."""
    console = Console(stderr=True)
    with exit_on_error("moiety advise", WorkloadError):
        check_policy(policy)
        chosen = find_device(device)
        workload, num_unserved = _read(trace, usage, seed)
        if classes is not None:
            work = WorkModel.of(chosen, workload.requests).of_request
            assigned = assign_classes(workload.requests, parse_shares(classes), work, seed)
            workload = replace(workload, requests=tuple(assigned))
        known = SHIPPED if class_targets is None else read_classes(class_targets)
        with console.status("measuring the capacity") as status:
            advisor = Advisor(
                workload,
                chosen,
                known,
                policy=policy,
                window_s=duration_s,
                seed=seed,
                on_progress=lambda text: status.update(f"simulating {text}"),
            )
            advice = advisor.advise()
    sentences = list(explain(advice, chosen, num_unserved))
    if not as_json:
        for sentence in sentences:
            typer.echo(f"- {sentence}")
        return
    settings = {
        "trace": workload.name,
        "device": msgspec.to_builtins(chosen),
        "policy": policy,
        "classes": classes,
        "duration_s": duration_s,
        "seed": seed,
    }
    report = {"environment": describe_environment("numpy"), "settings": settings, "num_unserved": num_unserved}
    typer.echo(json.dumps(report | {"advice": asdict(advice), "sentences": sentences}))


def explain(advice: Advice, device: SimulatedDevice, num_unserved: int = 0) -> Iterator[str]:
    """Yield the advice in sentences, each with its figures and its reason."""
    if num_unserved:
        yield f"{num_unserved} usage rows were not served and have no lengths: the actual load is higher."
    if advice.num_too_long:
        yield (
            f"{advice.num_too_long} requests are longer than the KV memory of {device.kv_tokens:,} tokens "
            "and were left out: they need a device with more memory."
        )
    yield from _explain_load(advice)
    yield from _explain_limits(advice, device)
    yield _explain_memory(advice)
    for bounds in advice.classes:
        yield _explain_class(bounds, bounds.name in advice.never_attained, advice.safe_load)
    if not advice.attained_at_safe_load:
        yield (
            f"With all settings together, some class attains its SLO for less than {REQUIRED_ATTAINMENT:.0%} of its "
            f"requests in a last run at {advice.safe_load:.2f} C: plan for less load, or use a longer --duration if "
            "the classes have few requests."
        )


def _explain_load(advice: Advice) -> Iterator[str]:
    yield (
        f"One replica does C = {advice.capacity_work_per_s:.3f} device-seconds of this work a second. "
        f"Every class attains its SLO for {REQUIRED_ATTAINMENT:.0%} of its requests up to "
        f"{advice.saturation:.2f} C, which is {advice.requests_per_s_at_saturation:.2f} requests a "
        "second: the saturation point."
    )
    yield (
        f"The {advice.num_requests:,} requests offer {advice.offered_mean:.2f} C on average, and "
        f"{advice.offered_peak:.2f} C in the busiest {advice.window_s:.0f} s. At {SAFE_SHARE:g} of the saturation "
        f"point a replica carries {advice.safe_load:.2f} C: run {_count(advice.num_replicas, 'replica')}."
    )
    breaker = advice.breaker
    if breaker is not None and breaker.share > 0.5 and advice.saturation < _LOW_SATURATION:
        yield (
            f"Tenant {breaker.tenant} has {breaker.share:.0%} of the SLO misses just beyond that point, "
            f"in class {breaker.service_class}: its bursts miss the SLO long before the replica is full. "
            "A class that queues requests or has a completion target is cheaper for it than more "
            "replicas."
        )
    share = advice.decode_share
    if share >= 0.5:
        yield (
            f"Decoding is {share:.0%} of the work (decode-bound). More concurrent requests raise the "
            "throughput, as long as the KV memory holds them."
        )
    else:
        yield (
            f"Prefill is {1 - share:.0%} of the work (prefill-bound). Prefix caching and faster "
            "arithmetic raise the throughput, not more concurrent requests."
        )


def _explain_limits(advice: Advice, device: SimulatedDevice) -> Iterator[str]:
    limits = advice.limits
    kept = limits.max_batch_tokens == device.max_batch_tokens
    why = (
        "half and double of it did not raise the goodput" if kept else f"more goodput than {device.max_batch_tokens:,}"
    )
    yield (
        f"Set --max-batch-tokens {limits.max_batch_tokens} ({why}). The longest step, prefill only with a "
        f"full KV memory, takes {1000 * limits.longest_step_s:.0f} ms."
    )
    advised, most = limits.max_running, limits.most_running
    if advised > device.max_running:
        why = (
            f"{most} requests ran at once, more than the limit in the device's description, and the KV "
            "memory was not full"
        )
    elif advised < device.max_running:
        why = f"requests were preempted for memory, which holds {limits.num_fitting} requests of this mix"
    elif limits.running_tried is not None:
        why = f"{limits.running_tried} was tried and had a lower goodput"
    else:
        why = f"at most {most} requests ran at once; the KV memory holds {limits.num_fitting} requests of this mix"
    yield f"Set --max-running {advised} ({why})."


def _explain_memory(advice: Advice) -> str:
    used, preempted = advice.kv_used_fraction, advice.preemptions_per_request
    text = (
        f"The KV memory is {used:.0%} full on average at the saturation point, with {preempted:.2f} "
        "preemptions per request"
    )
    if used < KV_LOW:
        return (
            f"{text}: below {KV_LOW:.0%}, longer contexts, a larger prefix cache or more running requests are possible."
        )
    if used > KV_FULL:
        return f"{text}: above {KV_FULL:.0%}, memory limits the replica. Use more memory, or run fewer requests."
    return f"{text}: well used."


def _explain_class(bounds: ClassBounds, never_attained: bool, load: float) -> str:
    measured = [
        f"{name} {_seconds(value)}"
        for name, value in (
            ("TTFT", bounds.ttft_p99_s),
            ("TPOT", bounds.tpot_p99_s),
            ("whole answer", bounds.e2e_p99_s),
        )
        if value is not None
    ]
    text = f"Class {bounds.name} at {load:.2f} C: p99 of " + ", ".join(measured or ["nothing measured"])
    advised = _options(bounds.ttft_s, bounds.tpot_s, bounds.completion_s)
    configured = _options(bounds.configured_ttft_s, bounds.configured_tpot_s, bounds.configured_completion_s)
    if never_attained:
        text += f". Its SLO ({configured}) is missed even on a nearly idle replica; attainable is {advised}"
    elif advised != configured:
        text += f". Its SLO could be {advised} instead of {configured}"
    else:
        text += f". Keep {configured}"
    text += f", attained by {bounds.attainment:.1%} of {bounds.num_requests} requests."
    if bounds.num_requests < _NUM_ENOUGH:
        text += " With so few requests, a p99 is uncertain."
    return text


def _options(ttft_s: float | None, tpot_s: float | None, completion_s: float | None) -> str:
    """Return the bounds as options of `moiety class set`."""
    named = (("--ttft-s", ttft_s), ("--tpot-s", tpot_s), ("--completion-s", completion_s))
    return " ".join(f"{option} {value:g}" for option, value in named if value is not None)


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _read(trace: Path | None, usage: Path | None, seed: int) -> tuple[Workload, int]:
    """Return the traffic, and the number of rows without lengths."""
    if trace is not None and usage is None:
        return load_workload(trace, seed=seed), 0
    if usage is not None and trace is None:
        return read_usage(usage)
    raise InvalidConfig("set either --trace or --usage, not both")
