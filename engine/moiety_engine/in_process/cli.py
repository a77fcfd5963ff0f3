"""The command `moiety batch run`: creates the engine for a file of requests.

The package that implements the API parses the lines; an entry point finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from moiety_engine.checkpoint import model_name, resolve_checkpoint
from moiety_engine.command_errors import print_error
from moiety_engine.config import EngineConfig, Overlap
from moiety_engine.errors import EngineError
from moiety_engine.logs import configure_logs
from moiety_engine.server import options, rank_options
from moiety_wire.engine_choices import Batching, DeviceChoice, Dtype, KvDtype, LoadFormat, MoeKernel, Quantization
from moiety_wire.replica import Replica

OFFLINE_GROUP = "moiety.offline"  # its entry point `run_file` answers a file with the replica that it is given


def batch_run(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="Requests, one a line.")],
    model: options.ModelOption = "",
    name: options.NameOption = "",
    output: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Answers, one a line; FILE with .answers.jsonl at its end if not given."),
    ] = None,
    device: options.DeviceOption = DeviceChoice.AUTO,
    dtype: options.DtypeOption = Dtype.AUTO,
    quantization: options.QuantizationOption = Quantization.AUTO,
    kv_dtype: options.KvDtypeOption = KvDtype.AUTO,
    moe_kernel: options.MoeKernelOption = MoeKernel.AUTO,
    batch_invariant: options.BatchInvariantOption = False,
    tp: rank_options.TpOption = 1,
    pp: rank_options.PpOption = 1,
    dp_attention: rank_options.DpAttentionOption = 1,
    ep: rank_options.EpOption = 1,
    ffn_ranks: rank_options.FfnRanksOption = 0,
    micro_batches: rank_options.MicroBatchesOption = 2,
    micro_batch_tokens: rank_options.MicroBatchTokensOption = 32,
    threads: options.ThreadsOption = None,
    batching: options.BatchingOption = Batching.CONTINUOUS,
    max_batch_tokens: options.MaxBatchTokensOption = None,
    max_running: options.MaxRunningOption = None,
    max_context_tokens: options.MaxContextTokensOption = None,
    static_batch_size: options.StaticBatchSizeOption = 8,
    load_format: options.LoadFormatOption = LoadFormat.AUTO,
    overlap: options.OverlapOption = Overlap.AUTO,
    cuda_graphs: options.CudaGraphsOption = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Answer a file of requests without a server, by an engine in this process.

    Lines are as of `moiety batch submit`; one file may ask different endpoints. Each answer is written as it comes.
    Stopped, by whatever, the same command goes on with the lines that have no answer yet.
    """
    configure_logs()
    run_file = _find_run_file()
    try:
        config = EngineConfig(
            model=str(resolve_checkpoint(model)),
            name=name or model_name(model),
            device=device.value,
            dtype=dtype.value,
            quantization=quantization.value,
            kv_dtype=kv_dtype.value,
            moe_kernel=moe_kernel,
            batch_invariant=batch_invariant,
            tp=tp,
            pp=pp,
            dp_attention=dp_attention,
            ep=ep,
            ffn_ranks=ffn_ranks,
            micro_batches=micro_batches,
            micro_batch_tokens=micro_batch_tokens,
            batching=batching,
            num_threads=threads,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            max_context_tokens=max_context_tokens,
            static_batch_size=static_batch_size,
            load_format=load_format,
            overlap=overlap,
            cuda_graphs=cuda_graphs,
            traced_steps_per_s=0.0,
        )
        run_file(file, output, model=config.name, open_replica=lambda: _open_replica(config), as_json=as_json)
    except EngineError as exc:
        print_error("moiety batch run", exc)
        raise typer.Exit(1) from exc


def _open_replica(config: EngineConfig) -> Replica:
    from moiety_engine.in_process.replica import InProcessReplica  # noqa: PLC0415 - imports torch

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        loading = progress.add_task("loading", total=None)
        return InProcessReplica(
            config, on_load=lambda done, total: progress.update(loading, completed=done, total=total)
        )


def _find_run_file() -> Callable[..., Any]:
    found = entry_points(group=OFFLINE_GROUP, name="run_file")
    if not found:
        typer.echo("Error: no installed package knows the API's requests; reinstall moiety", err=True)
        raise typer.Exit(1)
    loaded: Callable[..., Any] = next(iter(found)).load()
    return loaded
