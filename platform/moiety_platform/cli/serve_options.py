"""Options of `moiety serve`: names, environment variables and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moiety_platform.cli.config_file import take_defaults
from moiety_wire.engine_choices import Batching, DeviceChoice, Dtype, LoadFormat, MoeKernel, Quantization

ENGINE = "Engine"


MoreArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ENGINE_OPTIONS", help="Further options of `moiety engine`, after two dashes."),
]
ModelOption = Annotated[
    str | None, typer.Option(help="Checkpoint folder or hub id; without it the bundled demo model.")
]
NameOption = Annotated[str | None, typer.Option(help="What clients call the model; from --model if not given.")]
HostOption = Annotated[str, typer.Option(envvar="MOIETY_HOST", help="Address to listen on.")]
PortOption = Annotated[
    int, typer.Option(envvar="MOIETY_PORT", min=0, max=65535, help="Port of the API; 0 takes a free one.")
]
OperationsHostOption = Annotated[
    str, typer.Option(envvar="MOIETY_OPERATIONS_HOST", help="Address of the operations listener.")
]
OperationsPortOption = Annotated[
    int | None,
    typer.Option(
        envvar="MOIETY_OPERATIONS_PORT",
        min=0,
        max=65535,
        help="Port for /metrics and /schema, which need no key; 0 takes a free one. If not given, --port where --host "
        "is loopback, else 8002.",
    ),
]
DataDirOption = Annotated[
    Path, typer.Option(envvar="MOIETY_DATA_DIR", help="Where the database, the keys and the logs are kept.")
]
DashboardPortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port of the dashboard; 0 takes a free one.")]
NoDashboardOption = Annotated[bool, typer.Option("--no-dashboard", help="Leave the dashboard out.")]
TracesPortOption = Annotated[
    int, typer.Option(min=0, max=65535, help="Port of the trace store, which takes OTLP; 0 takes a free one.")
]
NoTracesOption = Annotated[bool, typer.Option("--no-traces", help="Keep no traces.")]
DrainOption = Annotated[int, typer.Option(min=0, help="How long a stop waits for running answers.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        callback=take_defaults,
        is_eager=True,
        help="TOML or YAML file; its table `serve` sets these options, `gateway` the gateway's.",
    ),
]
DeviceOption = Annotated[
    DeviceChoice | None, typer.Option(rich_help_panel=ENGINE, help="Where the model runs; auto if not given.")
]
DtypeOption = Annotated[
    Dtype | None, typer.Option(rich_help_panel=ENGINE, help="Type of the weights; auto if not given.")
]
QuantizationOption = Annotated[
    Quantization | None,
    typer.Option(rich_help_panel=ENGINE, help="How the weights of products are kept; as they are stored if not given."),
]
LoadFormatOption = Annotated[
    LoadFormat | None,
    typer.Option(rich_help_panel=ENGINE, help="dummy: weights drawn at random, without files; for measurements."),
]
MoeKernelOption = Annotated[
    MoeKernel | None,
    typer.Option(rich_help_panel=ENGINE, help="Who computes experts; auto, the fastest that can, if not given."),
]
BatchInvariantOption = Annotated[
    bool,
    typer.Option(
        "--batch-invariant", rich_help_panel=ENGINE, help="A request gets the same bits alone and in any batch."
    ),
]
BatchingOption = Annotated[
    Batching | None,
    typer.Option(rich_help_panel=ENGINE, help="How requests are put into steps; continuous if not given."),
]
MaxBatchTokensOption = Annotated[
    int | None, typer.Option(min=1, rich_help_panel=ENGINE, help="Token budget of one step.")
]
MaxRunningOption = Annotated[
    int | None, typer.Option(min=1, rich_help_panel=ENGINE, help="Most sequences in one step.")
]
MaxContextTokensOption = Annotated[
    int | None, typer.Option(min=1, rich_help_panel=ENGINE, help="Longest prompt and answer together.")
]
KvMemoryBytesOption = Annotated[
    str | None, typer.Option(rich_help_panel=ENGINE, help="Memory for the KV cache, such as 4GiB.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, rich_help_panel=ENGINE, help="Processor threads of the engine.")
]
ScriptedOption = Annotated[
    bool, typer.Option("--scripted", hidden=True, help="The scripted engine, which needs no model; for tests.")
]
