"""The commands `moiety bench engine` and `moiety bench scheduler`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from moiety_engine.bench.lengths import BenchLengths, fixed_lengths, trace_lengths
from moiety_engine.bench.scheduler import BenchLoad, measure_scheduler
from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.command_errors import print_error
from moiety_engine.config import (
    Batching,
    EngineConfig,
    ExpertEviction,
    LoadFormat,
    MoeKernel,
    Offload,
    OffloadConfig,
    Overlap,
    Speculate,
)
from moiety_engine.errors import EngineError
from moiety_engine.logs import configure_logs


def bench_engine(
    model: Annotated[str, typer.Option(help="checkpoint folder or hub id; default: the bundled demo model")] = "",
    num_prompts: Annotated[int, typer.Option(min=1)] = 32,
    input_tokens: Annotated[int | None, typer.Option(min=1, help="prompt length [128, or the trace's]")] = None,
    output_tokens: Annotated[int, typer.Option(min=1, help="output length, without a trace")] = 64,
    batching: Annotated[Batching, typer.Option()] = Batching.CONTINUOUS,
    trace: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="CSV to take lengths from")] = None,
    scale: Annotated[float, typer.Option(min=0.0001, help="multiplies the trace's lengths")] = 1.0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    quantization: Annotated[str, typer.Option(help="auto, none, int8, int4 or fp8")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="auto, bf16, fp8 or int8")] = "auto",
    moe_kernel: Annotated[MoeKernel, typer.Option(help="who computes experts")] = MoeKernel.AUTO,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="the same bits alone and in any batch")
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(min=1, help="token budget of a step")] = None,
    max_running: Annotated[int | None, typer.Option(min=1, help="requests in the batch")] = None,
    static_batch_size: Annotated[int, typer.Option(min=1, help="batch of static, dynamic and padded")] = 8,
    load_format: Annotated[LoadFormat, typer.Option(help="dummy: weights at random, without files")] = LoadFormat.AUTO,
    overlap: Annotated[
        Overlap, typer.Option(help="launch a step while the last one runs; auto: on a GPU")
    ] = Overlap.AUTO,
    speculate: Annotated[Speculate, typer.Option(help="guess tokens and verify several at once")] = Speculate.OFF,
    speculate_tokens: Annotated[int, typer.Option(min=1, help="the most tokens guessed at once")] = 7,
    draft_model: Annotated[str, typer.Option(help="checkpoint folder or hub id, for --speculate draft")] = "",
    cuda_graphs: Annotated[bool, typer.Option(help="replay decode steps, on a GPU")] = True,
    offload: Annotated[Offload, typer.Option(help="experts: keep them elsewhere, hot ones here")] = Offload.NONE,
    expert_memory_bytes: Annotated[
        int | None, typer.Option(min=1, help="of the device, for offloaded experts [half of what is left]")
    ] = None,
    offload_folder: Annotated[str, typer.Option(help="without a GPU: where their file is")] = "",
    expert_eviction: Annotated[
        ExpertEviction, typer.Option(help="which expert makes room for another")
    ] = ExpertEviction.FREQUENCY,
    expert_prefetch: Annotated[bool, typer.Option(help="fetch what the next layer would choose")] = True,
    tp: Annotated[int, typer.Option(min=1, help="ranks that share heads and columns")] = 1,
    dp_attention: Annotated[int, typer.Option(min=1, help="groups of such ranks, with sequences of their own")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="parts of the experts, over those ranks")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="stages of layers")] = 1,
    ffn_ranks: Annotated[int, typer.Option(min=0, help="further ranks, with the experts alone")] = 0,
    micro_batches: Annotated[int, typer.Option(min=1, help="of a step, with --ffn-ranks, at most")] = 2,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="the fewest of a micro-batch")] = 32,
    redundant_experts: Annotated[int, typer.Option(min=0, help="slots for second replicas of experts")] = 0,
    rebalance_every_s: Annotated[float | None, typer.Option(min=0, help="0: experts stay where they are")] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="instead, measure steps of many shapes for moiety simulate"),
    ] = None,
    calibrate_s: Annotated[float, typer.Option(min=1, help="about how long calibration may measure")] = 120.0,
    seed: Annotated[int, typer.Option()] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Offline throughput of the engine in this process, all requests submitted at once."""
    from moiety_engine.bench.calibration import calibrate as measure_steps  # noqa: PLC0415 - imports torch
    from moiety_engine.bench.engine import measure  # noqa: PLC0415

    configure_logs()
    console = Console(stderr=True)
    try:
        lengths: list[BenchLengths] = (
            fixed_lengths(num_prompts, input_tokens or 128, output_tokens)
            if trace is None
            else trace_lengths(trace, num_prompts, scale, input_tokens=input_tokens)
        )
        folder = resolve_checkpoint(model)
        config = EngineConfig(
            model=str(folder),
            name=folder.name,
            device=device,
            dtype=dtype,
            quantization=quantization,
            kv_dtype=kv_dtype,
            moe_kernel=moe_kernel,
            batch_invariant=batch_invariant,
            batching=batching,
            num_threads=threads,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            static_batch_size=static_batch_size,
            load_format=load_format,
            overlap=overlap,
            speculate=speculate,
            speculate_tokens=speculate_tokens,
            draft_model=str(resolve_checkpoint(draft_model)) if draft_model else "",
            cuda_graphs=cuda_graphs,
            offload=OffloadConfig(
                what=offload,
                memory_bytes=expert_memory_bytes,
                folder=offload_folder,
                eviction=expert_eviction,
                prefetch=expert_prefetch,
            ),
            tp=tp,
            dp_attention=dp_attention,
            ep=ep,
            pp=pp,
            ffn_ranks=ffn_ranks,
            micro_batches=micro_batches,
            micro_batch_tokens=micro_batch_tokens,
            redundant_experts=redundant_experts,
            rebalance_every_s=rebalance_every_s,
        )
        with Progress(console=console, disable=not console.is_terminal) as progress:
            loading = progress.add_task("loading", total=None)
            requests = progress.add_task("requests" if calibrate is None else "kinds of steps", total=num_prompts)
            if calibrate is not None:
                found = measure_steps(
                    config,
                    limit_s=calibrate_s,
                    seed=seed,
                    on_load=lambda done, total: progress.update(loading, completed=done, total=total),
                    on_trial=lambda done, total: progress.update(requests, completed=done, total=total),
                )
                calibrate.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
                wrote = f"wrote {calibrate}, wrong by {found.fit_error:.1%} on average"
                Console().print(f"{wrote}; use it with: moiety simulate --device {calibrate}", soft_wrap=True)
                return
            report = measure(
                config,
                lengths,
                seed=seed,
                on_load=lambda done, total: progress.update(loading, completed=done, total=total),
                on_done=lambda done: progress.update(requests, completed=done),
            )
    except EngineError as exc:
        print_error("moiety bench engine", exc)
        raise typer.Exit(1) from exc
    if as_json:
        typer.echo(json.dumps(report))
        return
    out = Console()
    out.print(f"ready in {report['ready_s']:.1f} s, {num_prompts} requests in {report['wall_s']:.1f} s ({batching})")
    out.print(f"{report['output_tokens_per_s']:.1f} output tokens/s, {report['total_tokens_per_s']:.1f} in all")
    for name in ("ttft_ms", "tpot_ms"):
        if report[name]:
            out.print(name, ", ".join(f"{p} {value:.1f}" for p, value in report[name].items()))
    out.print(f"KV slots allocated but unused: {100 * report['kv_waste_fraction']:.1f} %")


def bench_scheduler(
    running: Annotated[int, typer.Option(min=1, help="requests in the batch")] = 256,
    waiting: Annotated[int, typer.Option(min=1, help="requests that wait, kept at this number")] = 10_000,
    tenants: Annotated[int, typer.Option(min=1)] = 1_000,
    policy: Annotated[str, typer.Option(help="as of moiety engine --policy")] = "moiety",
    steps: Annotated[int, typer.Option(min=1, help="decisions to time")] = 500,
    seed: Annotated[int, typer.Option()] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """What the scheduler's decision costs when many requests run and very many wait. No model runs."""
    console = Console(stderr=True)
    load = BenchLoad(policy, running, waiting, tenants)
    try:
        with Progress(console=console, disable=not console.is_terminal) as progress:
            stepping = progress.add_task("steps", total=None)
            report = measure_scheduler(load, steps=steps, seed=seed, on_step=lambda: progress.advance(stepping))
    except EngineError as exc:
        print_error("moiety bench scheduler", exc)
        raise typer.Exit(1) from exc
    if as_json:
        typer.echo(json.dumps(report))
        return
    out = Console()
    out.print(f"{report['running']} running, {report['waiting']} waiting, {tenants} tenants ({policy})")
    for name in ("decision_us", "commit_us", "add_us"):
        if report[name]:
            out.print(name, ", ".join(f"{p} {value:.1f}" for p, value in report[name].items()))
    out.print(
        "median decision by number waiting:", ", ".join(f"{n}: {us:.0f} us" for n, us in report["growth"].items())
    )
    out.print(f"memory a waiting request, besides its tokens: {report['bytes_per_waiting']:.0f} bytes")
