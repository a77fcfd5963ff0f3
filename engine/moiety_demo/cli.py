"""Commands of the demo model: train it, evaluate it, sample its tasks."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from moiety_demo import checkpoint_path
from moiety_demo.domains import DOMAINS, Split, sample_tasks
from moiety_demo.evaluate import SEED_OF_EVALUATION, evaluate
from moiety_demo.folder import DemoCheckpointError
from moiety_demo.tables import render_report
from moiety_demo.train import TrainProgress, TrainSettings, train

DEFAULTS = TrainSettings()
app = typer.Typer(
    name="demo",
    no_args_is_help=True,
    help="Train and evaluate the bundled demo model, and print examples of its tasks.",
)


@app.command("train")
def train_command(
    output: Annotated[Path, typer.Argument(help="Folder for the trained model.")],
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = DEFAULTS.steps,
    max_duration_s: Annotated[
        float, typer.Option(min=0.001, help="Longest duration of the training, in seconds.")
    ] = math.inf,
    seed: Annotated[
        int, typer.Option(help="Random seed. The same seed, number of steps and number of threads give the same model.")
    ] = DEFAULTS.seed,
    threads: Annotated[int, typer.Option(min=1, help="Number of CPU threads.")] = DEFAULTS.threads,
    learning_rate: Annotated[
        float, typer.Option(min=0.0, help="Peak learning rate. A lower one is recommended with --from.")
    ] = (DEFAULTS.learning_rate),
    start: Annotated[Path | None, typer.Option("--from", help="Folder of a model to continue the training of.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Train the demo model from random weights, or continue the training of a model."""
    minutes = max_duration_s / 60
    settings = TrainSettings(steps=steps, minutes=minutes, seed=seed, threads=threads, learning_rate=learning_rate)
    console = Console(stderr=True)
    with _progress_bar(console) as bar:
        task = bar.add_task("training", total=1.0)
        last = train(output, settings, lambda progress: _show(bar, task, console, progress), start=start)
    if json_output:
        report = {"output": str(output), "settings": asdict(settings), **asdict(last)}
        if math.isinf(minutes):
            report["settings"]["minutes"] = None
        _print_json(report)
    else:
        typer.echo(f"trained in {last.wall_s:.0f} s ({last.cpu_s:.0f} CPU s); the model is in {output}")


@app.command("evaluate")
def evaluate_command(
    model: Annotated[
        Path | None, typer.Argument(help="Folder of the model. If not given, the bundled demo model.")
    ] = None,
    per_domain: Annotated[int, typer.Option(min=1, help="Number of held-out prompts per domain.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed that selects the prompts.")] = SEED_OF_EVALUATION,
    threads: Annotated[int, typer.Option(min=1, help="Number of CPU threads.")] = DEFAULTS.threads,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Measure the rate of exact answers per domain on held-out prompts, and the use of experts by each domain."""
    torch.set_num_threads(threads)
    with _progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task("evaluating", total=len(DOMAINS))
        try:
            report = evaluate(model or checkpoint_path(), per_domain, seed, _advance(bar, task))
        except DemoCheckpointError as exc:
            typer.echo(f"error: {exc}", err=True)
            raise typer.Exit(2) from exc
    if json_output:
        _print_json(asdict(report))
    else:
        Console().print(render_report(report))


@app.command("sample")
def sample_command(
    domain: Annotated[str | None, typer.Argument(help="Domain of the tasks. If not given, all domains.")] = None,
    num_tasks: Annotated[int, typer.Option("--num", min=1, help="Number of tasks per domain.")] = 5,
    held_out: Annotated[bool, typer.Option(help="Use the held-out split instead of the training split.")] = False,
    seed: Annotated[int, typer.Option(help="Seed that selects the tasks.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Print example tasks with their answers."""
    split = Split.HELD_OUT if held_out else Split.TRAIN
    if domain is not None and domain not in DOMAINS:
        typer.echo(f"error: unknown domain {domain!r}; choose one of {', '.join(DOMAINS)}", err=True)
        raise typer.Exit(2)
    names = [domain] if domain else list(DOMAINS)
    tasks = [task for name in names for task in sample_tasks(name, split, num_tasks, seed)]
    if json_output:
        _print_json({"split": split.value, "seed": seed, "tasks": [asdict(task) for task in tasks]})
    else:
        for task in tasks:
            typer.echo(f"{task.domain:13} {task.prompt}  ->  {task.answer}")


def _progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _advance(bar: Progress, task: TaskID) -> Callable[[str], None]:
    started: list[str] = []

    def show(domain: str) -> None:
        bar.update(task, completed=len(started), description=domain)
        started.append(domain)

    return show


def _show(bar: Progress, task: TaskID, console: Console, progress: TrainProgress) -> None:
    bar.update(task, completed=progress.fraction, description=f"step {progress.step}, loss {progress.loss:.3f}")
    if progress.accuracy:
        accuracy = ", ".join(f"{domain} {share:.0%}" for domain, share in progress.accuracy.items())
        rate = progress.tokens / progress.wall_s
        console.print(f"step {progress.step}: loss {progress.loss:.3f}, {rate:.0f} tokens/s, {accuracy}")


def _print_json(report: object) -> None:
    json.dump(report, sys.stdout, indent=2)
    sys.stdout.write("\n")
