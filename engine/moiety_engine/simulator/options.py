"""Options shared by `moiety simulate` and `moiety advise`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moiety_engine.simulator.devices import PRESETS

TraceFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="Trace of requests: CSV in the format of Moiety, Azure 2023 or VTC, or Mooncake JSON lines.",
    ),
]
DeviceName = Annotated[
    str, typer.Option(help=f"Simulated device: {', '.join(PRESETS)}, or a file of moiety bench engine --calibrate.")
]
ClassShares = Annotated[
    str | None, typer.Option(help="Service classes by share of the work, such as priority=0.2,standard=0.5,batch=0.3.")
]
ClassTargets = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="TOML file with a table for each service class to change or add."),
]
Seed = Annotated[int, typer.Option(help="Random seed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
GeneratedArrivals = Annotated[
    str | None,
    typer.Option(
        help="Random arrivals to generate, such as 'poisson:rate=3,tenant=a;onoff:rate=2,on=60,off=60,tenant=b'."
    ),
]
PolicyNames = Annotated[
    list[str] | None, typer.Option(help="Scheduling policy. May be given several times. If not given, moiety.")
]
OfferedLoad = Annotated[
    float | None, typer.Option(min=0.001, help="Offered load as a multiple of the capacity of the device.")
]
TraceLoadFactor = Annotated[
    float,
    typer.Option(min=0.001, help="Offered load as a multiple of the load of the trace. Not available with --load."),
]
NumReplicas = Annotated[
    int,
    typer.Option(
        min=1, help="Number of replicas that share the requests. One replica is simulated. Not available with --load."
    ),
]
NumDecodeDevices = Annotated[
    int,
    typer.Option(min=0, help="Number of decode devices. Every split of the devices between the roles is compared."),
]
KvBandwidth = Annotated[
    float, typer.Option(min=0.001, help="Bandwidth of the KV transfer from prefill to decode devices, in GB/s.")
]
ArrivalDuration = Annotated[
    float | None,
    typer.Option(min=1, help="Duration of the simulated arrivals, in seconds. A shorter trace is repeated."),
]
NumTenants = Annotated[
    int,
    typer.Option(
        min=1, help="Number of tenants among which the conversations of a trace without tenants are distributed."
    ),
]
MaxOutputTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Largest output length in tokens. If not given, the longest output of the trace."),
]
StepTokens = Annotated[
    int | None, typer.Option(min=1, help="Largest number of tokens in one step. If not given, the device's limit.")
]
