"""Token masks of grammars, computed by other processes while the model runs.

With overlapping steps, a request's last token is still being sampled when the next step is launched: a thread waits for
the token while the device continues with the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from moiety_engine.sampling import Best, Drawn
from moiety_engine.sampling.rows import Row
from moiety_engine.sampling.token_masks import TokenMasks, write_out
from moiety_engine.sequence import Sequence
from moiety_engine.staging import DeviceMark
from moiety_engine.structured_outputs.state import ASTRAY
from moiety_engine.structured_outputs.stepping import MAX_WORKERS, GrammarHandle, SteppingWorker
from moiety_wire.messages import FailureCode


class LaunchedStep(Protocol):
    """The previous step, whose tokens may not be in host memory yet."""

    @property
    def drawn(self) -> Drawn | Best: ...
    @property
    def done(self) -> DeviceMark: ...


class GrammarProblem(NamedTuple):
    """Request whose output cannot continue, with the reason."""

    key: int
    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class _Task:
    """Mask computation of one row."""

    place: int  # index among the rows with a grammar
    key: int
    handle: GrammarHandle
    known: list[int]  # output tokens that the grammar has not consumed yet
    pending_row: int  # row of one more token in the previous step's samples; -1 for none
    stops: list[int]  # stop tokens that are forbidden until min_tokens is reached


class StepMasks:
    """Masks of one step, possibly still being computed."""

    def __init__(self, allowed: TokenMasks, parts: list[Future[list[GrammarProblem]]]) -> None:
        self._allowed, self._parts = allowed, parts
        self.problems: list[GrammarProblem] = []  # filled by wait()

    def wait(self) -> TokenMasks:
        """Wait for all masks and return them."""
        for part in self._parts:
            self.problems += part.result()
        return self._allowed


class MaskMaker:
    """Computes grammar masks. Owns the threads that wait for the grammar processes, one per process.

    Used by the step loop's thread only.
    """

    def __init__(self, num_words: int, vocab_size: int, device: torch.device) -> None:
        """Create the mask maker.

        `num_words` is the number of 32-bit words of a mask. It follows from the grammars' tokenizer, whose vocabulary
        may be smaller than the model's; 0 where no row has a grammar.
        """
        self._num_words, self._vocab_size = num_words, vocab_size
        self._writes_out = device.type == "cpu"
        self._threads = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="masks") if num_words else None

    def begin(self, rows: Rows[Row], before: LaunchedStep | None) -> StepMasks | None:
        """Start to compute the masks of the rows that a step samples.

        `before` is the running step. Returns None if no row has a grammar.
        """
        constrained = [i for i, row in enumerate(rows) if row.request.grammar is not None]
        if not constrained or self._threads is None:
            return None
        words_JW = np.zeros((len(constrained), self._num_words), dtype=np.int32)
        banned_JV = np.empty((len(constrained), self._vocab_size), dtype=np.bool_) if self._writes_out else None
        by_worker: dict[SteppingWorker, list[_Task]] = {}
        for place, i in enumerate(constrained):
            task = _task(place, rows[i])
            by_worker.setdefault(task.handle.worker, []).append(task)
        parts = [
            self._threads.submit(_fill, worker, tasks, words_JW, banned_JV, before)
            for worker, tasks in by_worker.items()
        ]
        return StepMasks(TokenMasks(constrained, words_JW, banned_JV), parts)


def _task(place: int, row: Row) -> _Task:
    assert isinstance(row, Sequence), "rows with a grammar have no draft"
    handle, begin = row.request.grammar, row.request.num_prompt
    assert handle is not None, "only rows with a grammar have a mask"
    known = row.tokens[begin + handle.num_taken : row.num_known]
    stops = row.request.submit.stop_token_ids if row.num_output < row.request.submit.min_tokens else []
    return _Task(place, row.key, handle, known, row.pending_row, stops)


def _fill(
    worker: SteppingWorker,
    tasks: list[_Task],
    words_JW: np.ndarray,
    banned_JV: np.ndarray | None,
    before: LaunchedStep | None,
) -> list[GrammarProblem]:
    """Compute the masks of all rows of one process, in one round trip. Returns the problems."""
    if any(task.pending_row >= 0 for task in tasks):
        assert before is not None, "a token is pending but no step is running"
        before.done.wait()
    for task in tasks:
        pending = [] if task.pending_row < 0 or before is None else [int(before.drawn.token_L[task.pending_row])]
        task.handle.take(task.known + pending)
    masks, places = worker.step([task.handle for task in tasks])
    masks_NW = np.frombuffer(masks, dtype=np.int32).reshape(-1, words_JW.shape[1])
    for task, place in zip(tasks, places, strict=True):
        if place >= 0:
            words_JW[task.place] = masks_NW[place]
    problems = []
    for task in tasks:
        handle, words_W = task.handle, words_JW[task.place]
        if not handle.problem:
            _hold_open(words_W, task.stops)
            if not words_W.any():
                handle.fail(ASTRAY)
        if handle.problem:
            problems.append(GrammarProblem(task.key, handle.code, handle.problem))
            words_W[:] = -1  # the sampler must draw a token; it is discarded
    if banned_JV is not None:
        for part in _parts([task.place for task in tasks]):
            write_out(words_JW[part], banned_JV[part])
    return problems


def _parts(places: list[int]) -> list[slice]:
    """Return ascending indices as few slices; the slices of different processes never overlap."""
    parts, begin = [], 0
    for i in range(1, len(places) + 1):
        if i == len(places) or places[i] != places[i - 1] + 1:
            parts.append(slice(places[begin], places[i - 1] + 1))
            begin = i
    return parts


def _hold_open(words_W: np.ndarray, stops: list[int]) -> None:
    """Forbid the tokens `stops`, unless the mask allows no other token."""
    if not stops:
        return
    held_W = words_W.copy()
    for token_id in stops:
        if token_id // 32 < len(held_W):
            held_W[token_id // 32] &= np.int32(~(1 << token_id % 32) if token_id % 32 < 31 else 0x7FFFFFFF)
    if held_W.any():
        words_W[:] = held_W
