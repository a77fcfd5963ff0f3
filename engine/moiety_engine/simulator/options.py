"""Options shared by `moiety simulate` and `moiety advise`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moiety_engine.simulator.devices import PRESETS

TraceFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="own CSV, Azure 2023, VTC or Mooncake JSON lines")
]
DeviceName = Annotated[str, typer.Option(help=f"{', '.join(PRESETS)}, or a file of bench engine --calibrate")]
ClassShares = Annotated[
    str | None, typer.Option(help="classes by share of the demanded work: priority=0.2,standard=0.5,batch=0.3")
]
ClassTargets = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="TOML with a table for each class to change or add")
]
Seed = Annotated[int, typer.Option(help="of everything that is drawn")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on standard output")]
