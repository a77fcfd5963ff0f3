"""Command-line options of `moiety engine` for expert offloading."""

from __future__ import annotations

from typing import Annotated

import typer

from moiety_engine.config import ExpertEviction, Offload

OFFLOADING = "A model larger than its device"

OffloadOption = Annotated[
    Offload,
    typer.Option(
        envvar="MOIETY_ENGINE_OFFLOAD",
        rich_help_panel=OFFLOADING,
        help="experts: keep them in host memory, without a GPU in a file, and hot ones on the device.",
    ),
]
ExpertMemoryBytesOption = Annotated[
    str,
    typer.Option(
        envvar="MOIETY_ENGINE_EXPERT_MEMORY_BYTES",
        rich_help_panel=OFFLOADING,
        help="Memory of the device for offloaded experts, such as 16GiB; empty: half of what the rest leaves free.",
    ),
]
OffloadFolderOption = Annotated[
    str,
    typer.Option(
        envvar="MOIETY_ENGINE_OFFLOAD_FOLDER",
        rich_help_panel=OFFLOADING,
        help="Without a GPU: where offloaded experts are kept, in a file that the next start finds again.",
    ),
]
ExpertEvictionOption = Annotated[
    ExpertEviction,
    typer.Option(
        envvar="MOIETY_ENGINE_EXPERT_EVICTION",
        rich_help_panel=OFFLOADING,
        help="Which expert makes room for another; all: none are kept for the next pass, to compare with.",
    ),
]
ExpertPrefetchOption = Annotated[
    bool,
    typer.Option(
        envvar="MOIETY_ENGINE_EXPERT_PREFETCH",
        rich_help_panel=OFFLOADING,
        help="Fetch the experts ahead that the next layer's router would choose.",
    ),
]
