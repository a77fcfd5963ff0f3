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
