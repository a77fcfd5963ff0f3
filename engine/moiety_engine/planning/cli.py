"""The command `moiety plan`: takes a model, GPUs and SLO targets; prints layouts with figures and advises one."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moiety_engine.command_errors import exit_on_error
from moiety_engine.errors import InvalidConfig
from moiety_engine.planning.attention_ffn import (
    AttentionFfnComparison,
    AttentionFfnLayout,
    Sides,
    compare,
    why_not_apart,
)
from moiety_engine.planning.layouts import LATE, LayoutCandidate, TrafficDemand, evaluate_layouts
from moiety_engine.planning.machines import GPUS, LINK_REACHED, LINKS, find_gpu, find_network
from moiety_engine.planning.models import PRESETS, find_model
from moiety_kernels.environment import describe_environment

if TYPE_CHECKING:
    from moiety_engine.distribution.layout import Layout

_NUM_SHOWN = 12

PlannedModel = Annotated[
    str,
    typer.Option(
        help="Model: a folder with config.json, a hub id, or one of "
        f"{', '.join(PRESETS)}. If not given, the demo model."
    ),
]
GpuModel = Annotated[
    str,
    typer.Option(
        help=f"GPU model: {', '.join(GPUS)}; or cpu, the processor of this machine. The command measures it first."
    ),
]
LinkNames = Annotated[
    str,
    typer.Option(help=f"Links within a node and between nodes: nvlink (the version of the GPU), {', '.join(LINKS)}."),
]
ExpertGpu = Annotated[
    str,
    typer.Option(
        help="GPU model of the expert ranks with attention–FFN disaggregation. If not given, the value of --gpu."
    ),
]


def plan_command(
    model: PlannedModel = "",
    gpus: Annotated[int, typer.Option(min=1, max=4096, help="Total number of GPUs, which the replicas share.")] = 8,
    gpu: GpuModel = "h200",
    link: LinkNames = "nvlink,ib400",
    node_gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs in a node.")] = 8,
    input_tokens: Annotated[int, typer.Option(min=1, help="Prompt length of a request, in tokens.")] = 4000,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output length of a request, in tokens.")] = 1000,
    ttft_s: Annotated[float, typer.Option(min=0.001, help="SLO for the time to first token (TTFT), in seconds.")] = 2.0,
    tpot_s: Annotated[
        float, typer.Option(min=0.0001, help="SLO for the time per output token (TPOT), in seconds.")
    ] = 0.05,
    weights: Annotated[
        str, typer.Option(help="Format of the weights: auto (that of the checkpoint), bf16, fp8, int8 or int4.")
    ] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="Data type of the KV cache: auto (bf16), bf16, fp8 or int8.")] = "auto",
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Largest number of prompt tokens in one step.")] = 8192,
    balancedness: Annotated[
        float,
        typer.Option(
            min=0.05, max=1.0, help="Load balance of the ranks with experts: the mean load divided by the largest one."
        ),
    ] = 0.9,
    gpu_hour_usd: Annotated[float, typer.Option(min=0.0, help="Price of a GPU hour, in US dollars.")] = 2.0,
    expert_gpu: ExpertGpu = "",
    expert_gpu_hour_usd: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Price of an hour of an --expert-gpu, in US dollars. If not given, the value of --gpu-hour-usd.",
        ),
    ] = None,
    prompts_elsewhere: Annotated[
        bool,
        typer.Option(
            "--prompts-elsewhere", help="Assume that other GPUs compute the prompts and these GPUs only decode."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Compute memory, speed and cost of a model on GPUs by layout, without any GPU, and recommend one."""
    with exit_on_error("moiety plan"):
        machine = find_gpu(gpu)
        network = find_network(link, machine, node_gpus)
        served = find_model(model, weights, kv_dtype)
        if served.spec.needs_cpu:
            raise InvalidConfig(
                f"a {served.spec.family} model is served on a CPU only, since no GPU kernel computes its attention: "
                "give another model to plan GPUs for"
            )
        if input_tokens + output_tokens > served.spec.max_context_tokens:
            raise InvalidConfig(
                f"--input-tokens and --output-tokens are {input_tokens + output_tokens} tokens together, more than the "
                f"context length {served.spec.max_context_tokens} of {served.name}: use smaller values"
            )
        demand = TrafficDemand(
            input_tokens, output_tokens, ttft_s, tpot_s, gpu_hour_usd, max_batch_tokens, balancedness
        )
        demand = replace(demand, prompts_elsewhere=prompts_elsewhere)
        found = list(evaluate_layouts(served, gpus, machine, network, demand))
        price = 1.0 if expert_gpu_hour_usd is None else _price(expert_gpu_hour_usd, gpu_hour_usd)
        sides = Sides(machine, find_gpu(expert_gpu or gpu), network, price)
        apart = compare(served, gpus, sides, demand)
    ranked = sorted(found, key=lambda one: (one.problem is not None, -one.tokens_per_s_per_gpu, one.layout.num_ranks))
    advised = advise(ranked)
    if as_json:
        settings = {"model": served.name, "gpus": gpus, "gpu": asdict(machine), "network": asdict(network)}
        settings |= {"expert_gpu": asdict(sides.experts), "expert_gpu_price": sides.price}
        settings |= {"demand": asdict(demand), "link_reached": LINK_REACHED}
        settings |= {"weights": "bf16" if served.form is None else served.form.name}
        typer.echo(json.dumps(as_report(settings, ranked, advised, apart)))
        return
    out = Console()
    out.print(make_table(ranked))
    why_not = why_not_apart(served.spec) if served.spec.moe_layers else ""
    for sentence in [*explain(ranked, advised), *explain_attention_ffn(apart, why_not)]:
        out.print(f"- {sentence}", highlight=False, soft_wrap=True)


def as_report(
    settings: dict[str, Any],
    ranked: list[LayoutCandidate],
    advised: dict[str, LayoutCandidate | None],
    apart: dict[str, AttentionFfnComparison],
) -> dict[str, Any]:
    report: dict[str, Any] = {"environment": describe_environment("numpy"), "settings": settings}
    report |= {name: None if one is None else as_dict(one) for name, one in advised.items()}
    report["apart"] = {name: asdict(one) | {"pays": one.pays} for name, one in apart.items()}
    return report | {"layouts": [as_dict(one) for one in ranked]}


def advise(ranked: list[LayoutCandidate]) -> dict[str, LayoutCandidate | None]:
    """Return the best layout that the engine supports and the best of all; None where none attains the SLO."""
    good = [one for one in ranked if one.problem is None]
    return {
        "advised": next((one for one in good if one.in_engine), None),
        "best_of_all": next(iter(good), None),
    }


def as_dict(one: LayoutCandidate) -> dict[str, Any]:
    return asdict(one) | {"decode_s": one.decode.total_s, "prefill_s": one.prefill.total_s}


def make_table(ranked: list[LayoutCandidate]) -> Table:
    table = Table(title="layouts that attain the SLO, fastest first", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("tp", "dcp", "pcp", "dp", "ep", "pp", "×"):
        table.add_column(name, justify="right")
    for name in ("weights\nGB/GPU", "concurrent\nrequests", "TTFT\ns", "TPOT\nms", "tokens/s\na GPU", "$ per\nmillion"):
        table.add_column(name, justify="right")
    table.add_column("supported\nby engine")
    for one in [one for one in ranked if one.problem is None][:_NUM_SHOWN]:
        layout = one.layout
        table.add_row(
            *map(str, (layout.tp, layout.dcp, layout.pcp, layout.dp // layout.pcp, layout.ep, layout.pp, one.replicas)),
            f"{one.weight_bytes / 1e9:.1f}",
            f"{one.running:,}",
            f"{one.ttft_s:.2f}",
            f"{1000 * one.tpot_s:.1f}",
            f"{one.tokens_per_s_per_gpu:,.0f}",
            f"{one.usd_per_million_tokens:.2f}",
            "yes" if one.in_engine else "no",
        )
    return table


def explain(ranked: list[LayoutCandidate], advised: dict[str, LayoutCandidate | None]) -> list[str]:
    """Return sentences that recommend a layout and say why the others fail."""
    sentences = []
    ours, best = advised["advised"], advised["best_of_all"]
    if ours is not None:
        sentences.append(f"Run {ours.replicas} × moiety engine {options(ours)}: {_figures(ours)}.")
    else:
        sentences.append(
            "No layout that the engine supports attains the SLO: use more or larger GPUs, or a looser SLO."
        )
    if best is not None and not best.in_engine:
        sentences.append(
            f"{_attention_of(best.layout)} with experts over {best.layout.ep} "
            f"ranks would be faster ({_figures(best)}), but needs expert replicas, which the engine does "
            "not support."
        )
    refused = Counter(_kind_of(one.problem) for one in ranked if one.problem is not None)
    for problem, count in refused.most_common(4):
        sentences.append(f"{count} layouts are ruled out: {problem}.")
    return sentences


def explain_attention_ffn(found: dict[str, AttentionFfnComparison], why_not: str = "") -> list[str]:
    """Return sentences that say whether attention–FFN disaggregation pays. `why_not`: why the engine refuses it."""
    if why_not:
        return [f"Attention–FFN disaggregation is not available: {why_not}."]
    if not found:
        return []
    ours, best = found["advised"], found["best_of_all"]
    if not best.apart.running:
        return ["Attention–FFN disaggregation would not attain the SLO."]
    sentences = []
    if ours.apart.running:
        run = f": run {ours.apart.replicas} × moiety engine {attention_ffn_options(ours.apart)}" if ours.pays else ""
        sentences.append(
            f"Attention–FFN disaggregation {'pay' if ours.pays else 'do not pay'}, for decoding alone: "
            f"{_attention_ffn_figures(ours)}{run}."
        )
    if not best.apart.in_engine:
        sentences.append(
            "With expert replicas, which the engine does not support, disaggregation would "
            f"{'pay' if best.pays else 'not pay'} in another ratio: {_attention_ffn_figures(best)}."
        )
    return sentences


def attention_ffn_options(one: AttentionFfnLayout) -> str:
    """Return the layout as options of `moiety engine`."""
    named = (("--dp-attention", one.attention_gpus), ("--ffn-ranks", one.expert_gpus), ("--ep", one.expert_gpus))
    given = " ".join(f"{name} {value}" for name, value in named if value > 1 or name == "--ffn-ranks")
    return f"{given} --micro-batches {one.micro_batches}"


def _attention_ffn_figures(found: AttentionFfnComparison) -> str:
    one = found.apart
    return (
        f"{one.replicas} × {one.attention_gpus} GPUs for attention and {one.expert_gpus} for experts "
        f"reach {one.tokens_per_s_per_gpu:,.0f} tokens/s for the price of a GPU with {one.micro_batches} "
        "micro-batches; the best layout without disaggregation reaches "
        f"{found.together_tokens_per_s_per_gpu:,.0f}"
    )


def _price(experts_usd: float, attention_usd: float) -> float:
    """Return the price of an expert GPU relative to an attention GPU."""
    if not attention_usd:
        raise InvalidConfig("--expert-gpu-hour-usd needs --gpu-hour-usd, which is 0: set both")
    return experts_usd / attention_usd


def _kind_of(problem: str) -> str:
    """Return the problem without the numbers that differ between layouts."""
    if problem.startswith("one request takes"):
        return "a single request is slower than the TPOT target"
    return "the TTFT is above its target" if problem.startswith(LATE) else problem


def _attention_of(layout: Layout) -> str:
    groups = f"{layout.dp} groups of {layout.tp}"
    return f"Attention in {groups}" if layout.pcp == 1 else f"Prefill context parallelism in {groups}"


def options(one: LayoutCandidate) -> str:
    """Return the layout as options of `moiety engine`."""
    layout = one.layout
    named = (
        ("--tp", layout.tp),
        ("--decode-context-parallel", layout.dcp),
        ("--prefill-context-parallel", layout.pcp),
        ("--dp-attention", layout.dp // layout.pcp),
        ("--ep", layout.ep),
        ("--pp", layout.pp),
    )
    return " ".join(f"{name} {value}" for name, value in named if value > 1) or "on one GPU each"


def _figures(one: LayoutCandidate) -> str:
    return (
        f"{one.tokens_per_s_per_gpu:,.0f} output tokens/s a GPU with {one.running:,} requests at once, "
        f"{1000 * one.tpot_s:.0f} ms a token, the first after {one.ttft_s:.2f} s, "
        f"${one.usd_per_million_tokens:.2f} a million"
    )
