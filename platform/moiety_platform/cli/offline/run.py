"""Offline inference: answers a whole file of requests with a replica in this process.

The engine steps in a thread; meanwhile lines are read, checked and tokenized for its next steps, and answers are
written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.offline.answer_file import AnswerFile
from moiety_platform.cli.offline.input_file import Work, read_work
from moiety_platform.cli.offline.offline_line import OfflineLine, ask
from moiety_platform.cli.printing import print_line
from moiety_platform.cli.tables import show_json, show_row
from moiety_platform.inference.model_texts import ModelText
from moiety_text.errors import TextError
from moiety_wire.messages import Accepted, Failed, Finished, Submit, ToGateway, Tokens
from moiety_wire.replica import Replica

FULL_BATCHES = 2  # kept at the engine, so that no step waits for requests
INLINE_BYTES = 64 * 1024  # of prompts; longer ones are tokenized in a thread
EXIT_INTERRUPTED = 130


@dataclass(slots=True)
class _LineCounts:
    """Counts of the lines of this run."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def run_file(
    file: Path, output: Path | None, *, model: str, open_replica: Callable[[], Replica], as_json: bool
) -> None:
    """Answer the lines of `file` that have no answer in `output`.

    The replica, which serves `model`, is opened only if there are any. Raises CommandError.
    """
    path = output or file.with_name(f"{file.stem}.answers.jsonl")
    if path.resolve() == file.resolve():
        raise CommandError(f"{path} is the file of requests; give another --output")
    work = read_work(file, model)
    with AnswerFile(path) as answers:
        left = _unanswered(work, answers, file)
        report = _report(model, file, path, len(work), len(work) - len(left))
        if left:
            replica = open_replica()
            try:
                report |= _answer(replica, left, file, answers)
            finally:
                replica.close()
    if as_json:
        show_json(report)
    else:
        show_row({name: value for name, value in report.items() if name not in ("environment", "settings")}, False)


def _unanswered(work: list[Work], answers: AnswerFile, file: Path) -> list[Work]:
    """Return the lines without an answer. Raises CommandError if the answers belong to another file or model."""
    keys = {one.custom_id: one.key for one in work}
    for custom_id, key in answers.keys.items():
        if keys.get(custom_id) != key:
            raise CommandError(
                f"{answers.path} has an answer to {custom_id[:64]!r} that is of another line or model than {file} has; "
                "give another --output"
            )
    return [one for one in work if one.custom_id not in answers.keys]


def _report(model: str, file: Path, path: Path, lines: int, answered_before: int) -> dict[str, Any]:
    return {
        "settings": {"model": model, "file": str(file), "output": str(path)},
        "output": str(path),
        "lines": lines,
        "answered_before": answered_before,
        **msgspec.to_builtins(_LineCounts()),
    }


def _answer(replica: Replica, left: list[Work], file: Path, answers: AnswerFile) -> dict[str, Any]:
    """Answer the lines, and return the run's figures."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    begin_s = time.perf_counter()
    counts = _LineCounts()
    with (
        Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress,
        file.open("rb") as data,
    ):
        bar = progress.add_task("lines", total=len(left))
        answering = Answering(replica, data, answers, counts, on_done=lambda: progress.advance(bar))
        try:
            asyncio.run(answering.run(left))
        except KeyboardInterrupt as exc:
            num_open = len(left) - counts.answered - counts.failed
            print_line(f"moiety: stopped; {num_open:,} lines are left; run the same command to continue", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from exc
    wall_s = time.perf_counter() - begin_s
    return {
        **msgspec.to_builtins(counts),
        "environment": replica.environment(),
        "wall_s": wall_s,
        "output_tokens_per_s": counts.output_tokens / wall_s,
        "total_tokens_per_s": (counts.prompt_tokens + counts.output_tokens) / wall_s,
    }


@dataclass(slots=True)
class Answering:
    """Lines of one run: reading ahead, running at the engine, writing answers."""

    replica: Replica
    data: BinaryIO
    answers: AnswerFile
    counts: _LineCounts
    on_done: Callable[[], None]
    _open: dict[str, tuple[OfflineLine, int]] = field(default_factory=dict)  # by the sequence's id

    async def run(self, left: list[Work]) -> None:
        """Answer all lines. Raises CommandError, and the replica's errors."""
        ahead: asyncio.Queue[OfflineLine | None] = asyncio.Queue(self._most_open())
        try:
            text = await asyncio.to_thread(ModelText, self.replica.card, INLINE_BYTES)
        except TextError as exc:
            raise CommandError(f"the model's text files cannot be used: {exc}") from exc
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_ahead(left, text, ahead))
                tasks.create_task(self._run_engine(ahead))
        except ExceptionGroup as group:  # the first error has cancelled the other task
            raise group.exceptions[0] from None

    def _most_open(self) -> int:
        return FULL_BATCHES * self.replica.max_running

    async def _read_ahead(self, left: list[Work], text: ModelText, ahead: asyncio.Queue[OfflineLine | None]) -> None:
        for work in left:
            self.data.seek(work.start)
            asked = await ask(work, self.data.read(work.num_bytes), self.replica.card, text)
            if isinstance(asked, OfflineLine):
                await ahead.put(asked)
            else:
                self._note(asked, failed=True)
            await asyncio.sleep(0)  # a short line involves no waiting, and the engine's step may have ended
        await ahead.put(None)

    async def _run_engine(self, ahead: asyncio.Queue[OfflineLine | None]) -> None:
        is_over = False
        while not is_over or self._open:
            fresh: list[Submit] = []
            while not is_over and len(self._open) < self._most_open() and (not ahead.empty() or not self._open):
                asked = await ahead.get()
                is_over = asked is None
                if asked is not None:
                    self._open |= {one.request_id: (asked, index) for index, one in enumerate(asked.submits)}
                    fresh += asked.submits
            if self._open:
                await self._take(await asyncio.to_thread(self.replica.advance, fresh))

    async def _take(self, told: list[ToGateway]) -> None:
        for message in told:
            if not isinstance(message, Tokens | Finished | Failed):
                assert isinstance(message, Accepted), "a replica tells of requests only"
                continue
            asked, index = self._open[message.request_id]
            asked.take(index, message)
            if not isinstance(message, Tokens):
                del self._open[message.request_id]
                if not asked.num_open:
                    await self._end(asked)

    async def _end(self, asked: OfflineLine) -> None:
        answer = await asked.answer()
        usage = asked.usage()
        self.counts.prompt_tokens += usage.prompt_tokens
        self.counts.cached_tokens += usage.cached_tokens
        self.counts.output_tokens += usage.output_tokens
        self._note(answer, failed=asked.failure is not None)

    def _note(self, answer: bytes, *, failed: bool) -> None:
        self.answers.add(answer)
        self.counts.failed += failed
        self.counts.answered += not failed
        self.on_done()
