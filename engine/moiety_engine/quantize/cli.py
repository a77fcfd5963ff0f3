"""Command `moiety quantize`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import EngineConfig
from moiety_engine.errors import EngineError
from moiety_engine.logs import configure_logs

WRONG_USE = 2
_CONTEXT = 1024  # tokens of a text per forward pass


def quantize_command(
    target: Annotated[Path, typer.Argument(help="Folder for the quantized checkpoint. It must not exist.")],
    model: Annotated[
        str, typer.Option(help="Checkpoint to quantize: a folder or hub id. If not given, the bundled demo model.")
    ] = "",
    to: Annotated[
        str,
        typer.Option(
            help="Format of the weights: int8 or fp8 (one scale per row), or int4 (one scale per 32 weights)."
        ),
    ] = "int8",
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="UTF-8 text on which the perplexity is measured.")
    ] = None,
    per_domain: Annotated[
        int, typer.Option(min=1, help="Number of held-out tasks per domain, for the demo model.")
    ] = 100,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Write a checkpoint with weights of 8 or 4 bits, and measure its quality before and after.

    The demo model is measured on its held-out tasks; any other on --text, or not at all without one.
    """
    from moiety_engine.quantize.report import quantize_and_measure  # noqa: PLC0415 - imports torch

    configure_logs()
    console = Console(stderr=True)
    try:
        source = resolve_checkpoint(model)
        config = EngineConfig(model=str(source), name=source.name, device="cpu", num_threads=threads)
        with Progress(console=console, disable=not console.is_terminal) as progress:
            tasks = {name: progress.add_task(name, total=None) for name in ("writing", "before", "after")}

            def note(name: str, done: int, total: int) -> None:
                progress.update(tasks[name], completed=done, total=total)

            passage = None if text is None else text.read_text(encoding="utf-8")
            report = quantize_and_measure(config, target, to, passage, per_domain, _CONTEXT, note)
    except (EngineError, UnicodeDecodeError) as exc:
        typer.echo(f"Error: {exc}", err=True)
        raise typer.Exit(WRONG_USE) from exc
    typer.echo(json.dumps(asdict(report)) if as_json else _summary(asdict(report)))


def _summary(report: dict[str, Any]) -> str:
    before, after = report["bytes_before"], report["bytes_after"]
    lines = [f"{report['target']}: {after / 2**20:.1f} MiB, {after / before:.0%} of {before / 2**20:.1f} MiB"]
    if report["before"] is None:
        return "\n".join([*lines, "quality was not measured; give --text FILE to measure the perplexity"])
    for name, value in (("before", report["before"]), ("after", report["after"])):
        accuracy = "" if value["accuracy"] is None else f", {value['accuracy']:.1%} of held-out tasks exact"
        lines.append(f"{name}: perplexity {value['perplexity']:.4f}{accuracy}")
    return "\n".join(lines)
