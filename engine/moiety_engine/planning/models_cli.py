"""The command `moiety models`: lists the families that are served, or reports on one checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from moiety_engine.command_errors import print_error
from moiety_engine.errors import EngineError
from moiety_engine.model.families.catalog import CATALOG
from moiety_engine.model.families.wrapped import WRAPPERS
from moiety_engine.planning.layout_support import layout_table
from moiety_engine.planning.model_support import EVERYWHERE, family_features, family_table, report_on

if TYPE_CHECKING:
    from moiety_engine.planning.model_support import CheckpointReport

_GIB, _MIB = 1 << 30, 1 << 20


def models_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Checkpoint to report on: a folder, GGUF file, config.json or hub id. If not given, all families."
        ),
    ] = None,
    weights: Annotated[
        str, typer.Option(help="Format of the weights: auto (that of the checkpoint), bf16, fp8, int8 or int4.")
    ] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="Data type of the KV cache: auto (bf16), bf16, fp8 or int8.")] = "auto",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table of families of the documentation, in Markdown.")
    ] = False,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="Print the features available on each layout of ranks, in Markdown.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """List the model families that are served, or say whether a checkpoint would be, with which memory and features."""
    if layouts:
        typer.echo(layout_table(), nl=False)
    elif model is None:
        _print_families(markdown=markdown, as_json=as_json)
    else:
        _print_report(model, weights, kv_dtype, as_json=as_json)


def _print_families(*, markdown: bool, as_json: bool) -> None:
    if markdown:
        typer.echo(family_table(), nl=False)
    elif as_json:
        found = {name: asdict(one) | {"features": asdict(family_features(name))} for name, one in CATALOG.items()}
        typer.echo(json.dumps({"families": found}))
    else:
        listed = {name: entry.examples for name, entry in CATALOG.items()}
        listed |= {name: f"{one.examples} (their text)" for name, one in WRAPPERS.items()}
        width = max(map(len, listed))
        for name, examples in sorted(listed.items()):
            typer.echo(f"{name:<{width}}  {examples}")


def _print_report(model: str, weights: str, kv_dtype: str, *, as_json: bool) -> None:
    """Print the report on a checkpoint; exit with 1 if it would not be served."""
    try:
        report = report_on(model, weights, kv_dtype)
    except EngineError as exc:
        if as_json:
            typer.echo(json.dumps({"served": False, "reason": str(exc)}))
        else:
            print_error("moiety models", exc)
        raise typer.Exit(1) from exc
    served = not report.missing
    if as_json:
        typer.echo(json.dumps({"served": served} | asdict(report)))
    else:
        for line in lines_of(report):
            typer.echo(_printable(line))
    if not served:
        raise typer.Exit(1)


def lines_of(report: CheckpointReport) -> list[str]:
    """Return the report as lines of text."""
    features = asdict(report.features)
    lines = [
        f"{report.model}: {'served' if not report.missing else 'not complete'}, family {report.family}",
        f"weights: {_size(report.weight_bytes)} in {report.weight_format}"
        + (f"; the checkpoint has {report.quantization}" if report.quantization else ""),
        f"KV cache: {report.kv_bytes_per_token:,} bytes per token, "
        f"{_size(report.kv_bytes_per_token * report.max_context_tokens)} for a context of "
        f"{report.max_context_tokens:,} tokens",
        *([f"recurrent states: {_size(report.state_bytes)} per request"] if report.state_bytes else []),
        *(f"{name.replace('_', ' ')}: {answer}" for name, answer in features.items()),
        f"as with every model: {', '.join(EVERYWHERE)}",
        f"tool calls: {report.tool_format or 'no format found in a chat template'}",
        f"reasoning: {report.reasoning_format or 'no format found in a chat template'}",
    ]
    lines += [f"missing: {one}" for one in report.missing]
    if report.ignored_keys:
        lines.append(f"keys of config.json that are not read: {', '.join(report.ignored_keys)}")
    return lines


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"


def _printable(text: str) -> str:
    """Return text from a checkpoint without terminal escape sequences."""
    return "".join(one if one.isprintable() else f"\\u{ord(one):04x}" for one in text)
