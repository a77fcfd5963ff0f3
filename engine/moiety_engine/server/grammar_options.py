"""Command-line options of `moiety engine` for structured outputs."""

from __future__ import annotations

from typing import Annotated

import typer

STRUCTURED_OUTPUTS = "Structured outputs"

GrammarCompileCpuOption = Annotated[
    float,
    typer.Option(
        "--grammar-compile-cpu-s",
        envvar="MOIETY_ENGINE_GRAMMAR_COMPILE_CPU_S",
        min=0.05,
        max=60,
        rich_help_panel=STRUCTURED_OUTPUTS,
        help="Most processor time of compiling one grammar, in seconds; a grammar that takes more is refused.",
    ),
]
GrammarCompileWallOption = Annotated[
    float,
    typer.Option(
        "--grammar-compile-wall-s",
        envvar="MOIETY_ENGINE_GRAMMAR_COMPILE_WALL_S",
        min=0.05,
        max=60,
        rich_help_panel=STRUCTURED_OUTPUTS,
        help="Most time of compiling one grammar by the clock, in seconds.",
    ),
]
GrammarCompileMemoryOption = Annotated[
    str,
    typer.Option(
        envvar="MOIETY_ENGINE_GRAMMAR_COMPILE_MEMORY_BYTES",
        rich_help_panel=STRUCTURED_OUTPUTS,
        help="Most memory of compiling one grammar, such as 512MiB.",
    ),
]
GrammarWorkerMemoryOption = Annotated[
    str,
    typer.Option(
        envvar="MOIETY_ENGINE_GRAMMAR_WORKER_MEMORY_BYTES",
        rich_help_panel=STRUCTURED_OUTPUTS,
        help="Most memory of a process that steps the grammars of many requests, such as 4GiB.",
    ),
]
GrammarQueueOption = Annotated[
    int,
    typer.Option(
        "--grammar-queue",
        envvar="MOIETY_ENGINE_GRAMMAR_QUEUE",
        min=1,
        rich_help_panel=STRUCTURED_OUTPUTS,
        help="Grammars of one tenant that may wait to be compiled; further ones are refused with 429.",
    ),
]
