"""What guides let through next, found by threads while the model runs.

Where steps overlap, a guide's last token is still being sampled when the next step is launched: a thread waits for it,
as the device goes on with the pass.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from moiety_engine.sampling import Best, Drawn
from moiety_engine.sampling.allowed import Allowed, write_out
from moiety_engine.sampling.rows import Row
from moiety_engine.sequence import Sequence
from moiety_engine.staging import Mark
from moiety_engine.structured_outputs.state import ASTRAY, TOO_COSTLY, GrammarState

MAX_THREADS = 4
ROWS_A_THREAD = 8  # fewer are not worth another one
MAX_ROW_S = 0.25  # of a processor's time: a guide that takes longer for one token holds up too many


class Launched(Protocol):
    """The step before, whose tokens may be on their way."""

    @property
    def drawn(self) -> Drawn | Best: ...
    @property
    def done(self) -> Mark: ...


@dataclass(frozen=True, slots=True)
class _Task:
    """One row."""

    key: int
    follower: GrammarState
    known: list[int]  # tokens of the answer that the guide has not taken
    pending_row: int  # of one more in what the step before samples; -1 if there is none
    stops: list[int]  # tokens that may not end the answer yet


class Masks:
    """What is being found for one step."""

    def __init__(self, allowed: Allowed, parts: list[Future[list[tuple[int, str]]]]) -> None:
        self._allowed, self._parts = allowed, parts
        self.problems: list[tuple[int, str]] = []  # once they are there: whose answer cannot go on, and why

    def wait(self) -> Allowed:
        for part in self._parts:
            self.problems += part.result()
        return self._allowed


class MaskMaker:
    """Owns the threads. Used by the step loop's."""

    def __init__(self, num_words: int, vocab_size: int, device: torch.device) -> None:
        """`num_words`: of a mask, by the guides' tokenizer, whose vocabulary may be smaller than the model's."""
        self._num_words, self._vocab_size = num_words, vocab_size
        self._writes_out = device.type == "cpu"
        self._num_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="masks") if num_words else None

    def begin(self, rows: Rows[Row], before: Launched | None) -> Masks | None:
        """For rows that a step samples; None if none of them has a guide. `before`: the step that runs."""
        guided = [i for i, row in enumerate(rows) if row.guide is not None]
        if not guided or self._threads is None:
            return None
        tasks = [_task(rows[i]) for i in guided]
        words_JW = np.zeros((len(tasks), self._num_words), dtype=np.int32)
        banned_JV = np.empty((len(tasks), self._vocab_size), dtype=np.bool_) if self._writes_out else None
        size = max(ROWS_A_THREAD, -(-len(tasks) // self._num_threads))
        parts = []
        for begin in range(0, len(tasks), size):
            part = slice(begin, begin + size)
            banned = None if banned_JV is None else banned_JV[part]
            parts.append(self._threads.submit(_fill, tasks[part], words_JW[part], banned, before))
        return Masks(Allowed(guided, words_JW, banned_JV), parts)


def _task(row: Row) -> _Task:
    assert isinstance(row, Sequence), "who has a guide gets no draft"
    follower, begin = row.guide, row.num_prompt
    assert follower is not None, "only rows with a guide have a mask"
    known = row.tokens[begin + follower.num_taken : row.num_known]
    stops = row.submit.stop_token_ids if row.num_output < row.submit.min_tokens else []
    return _Task(row.key, follower, known, row.pending_row, stops)


def _fill(
    tasks: list[_Task], words_JW: np.ndarray, banned_JV: np.ndarray | None, before: Launched | None
) -> list[tuple[int, str]]:
    """The rows of the masks, one after the other. Returns the problems."""
    if any(task.pending_row >= 0 for task in tasks):
        assert before is not None, "a token is pending, and no step runs"
        before.done.wait()
    problems = []
    for task, words_W in zip(tasks, words_JW, strict=True):
        follower = task.follower
        pending = [] if task.pending_row < 0 or before is None else [int(before.drawn.token_L[task.pending_row])]
        begin_s = time.thread_time()
        follower.take(task.known + pending)
        follower.write(words_W.ctypes.data, words_W.nbytes)
        if time.thread_time() - begin_s > MAX_ROW_S:
            follower.problem = follower.problem or TOO_COSTLY
        _hold_open(words_W, task.stops)
        if not follower.problem and not words_W.any():
            follower.problem = ASTRAY
        if follower.problem:
            problems.append((task.key, follower.problem))
            words_W[:] = -1  # something must be drawn; it is thrown away
    if banned_JV is not None:
        write_out(words_JW, banned_JV)
    return problems


def _hold_open(words_W: np.ndarray, stops: list[int]) -> None:
    """Nothing of `stops` comes next, unless nothing else can."""
    if not stops:
        return
    held_W = words_W.copy()
    for token_id in stops:
        if token_id // 32 < len(held_W):
            held_W[token_id // 32] &= np.int32(~(1 << token_id % 32) if token_id % 32 < 31 else 0x7FFFFFFF)
    if held_W.any():
        words_W[:] = held_W
