"""Ranks of the tests' own: `python rank.py IN,OUT …` is one process for each pair of pipes, which serves one group
after the other, so that the ranks of many tests import torch once.

A line in is (configuration, where to meet, requests). Rank 0 answers with a line of what came of the requests.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

import msgspec
import numpy as np

from moiety_engine.assembly import follow
from moiety_engine.config import EngineConfig
from moiety_engine.distribution.meeting import Meeting
from moiety_engine.errors import EngineError, OutOfMemory
from moiety_engine.logs import configure_logs
from moiety_engine.loop import EngineLoop, load_loop
from moiety_engine.messages import CoreFinish, CoreSubmit
from moiety_engine.model import residence
from moiety_engine.model.residence import Residence, named_tensors
from moiety_engine.offline import run_all
from moiety_wire.experts import AskExperts, unpack_counts


class Work(msgspec.Struct):
    config: EngineConfig
    meeting: Meeting | None
    waves: list[list[CoreSubmit]]  # one after the other
    naps: bool = False  # between waves
    again: bool = False  # and again, until it is ended
    counts: bool = False  # experts' picks
    hurries: float = 0.0  # seconds that pass whenever the loop asks what time it is
    shuffles: bool = False  # experts go to slots drawn at random, and on to others, all the time
    fails: str = ""  # with these words on rank 0, after all
    lacks: str = ""  # room on rank 1 for what a nap moves: `host`, `device`; or on all ranks, for the `cache`


class Answer(msgspec.Struct):
    """`best` are the two best logits' log-probabilities of each token; all by request."""

    error: str = ""
    token_ids: dict[int, list[int]] = {}
    best: dict[int, list[list[float]]] = {}
    num_recomputed: int = 0
    num_cached: int = 0
    num_swapped: int = 0
    weight_bytes: int = 0
    num_computed: int = 0  # tokens
    num_picks: int = 0  # of experts, counted for them
    vectors: dict[int, list[float]] = {}
    refusals: list[str] = []
    moves: dict[str, float] = {}  # of experts between ranks, what the engine tells of them


def refusal(do: Callable[[], object]) -> str:
    try:
        do()
    except OutOfMemory as exc:
        return str(exc)
    return ""


def nap(loop: EngineLoop, lacks: str) -> str:
    """Sleep and wake; what was said where there was no room."""
    said = refusal(loop.sleep) if lacks == "host" else ""
    assert not loop.asleep
    if lacks == "host":
        return said
    loop.sleep()
    fitting = loop.sizes
    if lacks == "cache":
        loop.sizes = replace(fitting, num_blocks=1 << 50)
    if lacks:
        said = refusal(loop.wake)
        assert loop.asleep
    loop.sizes = fitting
    loop.wake()
    return said


@contextlib.contextmanager
def lacking(what: str) -> Iterator[None]:
    """On another rank than the first. A device has room at every second try."""
    whole = Residence.come_back
    tries = itertools.count()

    def come_back(self: Residence, on_progress: Callable[[], None]) -> None:
        if next(tries) % 2 == 0:
            raise OutOfMemory("there is no room")
        whole(self, on_progress)

    with contextlib.ExitStack() as stack:
        if what == "host":
            stack.enter_context(patch.object(residence, "available_bytes", lambda: 0))
        if what == "device":
            stack.enter_context(patch.object(Residence, "come_back", come_back))
        yield


def num_computed(submit: CoreSubmit, finish: CoreFinish) -> int:
    """Tokens of a request that went through the model; its last one did not."""
    num_tokens = len(submit.prompt_ids) + max(0, finish.num_output_tokens - 1)
    return num_tokens - finish.num_cached_tokens + finish.num_recomputed_tokens


def shuffler(loop: EngineLoop) -> Callable[[int], None]:
    """Whenever experts are where they shall be, they shall be elsewhere, drawn at random, some in many slots."""
    assert loop.rebalancing is not None
    balancer, rng = loop.rebalancing.balancer, np.random.default_rng(0)

    def shuffle(_: int) -> None:
        shape = balancer.placement
        if balancer.is_moving:
            return
        for layer in range(shape.num_layers):
            spare = rng.choice(rng.integers(0, shape.num_experts, 2), shape.num_slots - shape.num_experts)
            balancer.aim(layer, rng.permutation(np.concatenate([np.arange(shape.num_experts), spare])))

    return shuffle


def work_through(work: Work) -> Answer:
    hasty = itertools.count(time.time_ns(), int(1e9 * work.hurries))
    clock_ns = hasty.__next__ if work.hurries else time.time_ns
    with load_loop(work.config, meeting=work.meeting, clock_ns=clock_ns) as loop:
        return answer_of(work, loop)


def answer_of(work: Work, loop: EngineLoop) -> Answer:
    answer = Answer()
    loop.warm_up()
    storages = {tensor.untyped_storage() for _, tensor in named_tensors(loop.model._weights)}
    answer.weight_bytes = sum(storage.nbytes() for storage in storages)
    shuffle = shuffler(loop) if work.shuffles else None
    for wave in itertools.cycle(work.waves) if work.again else work.waves:
        for submit, (key, result) in zip(wave, run_all(loop, wave, on_step=shuffle).items(), strict=True):
            assert result.finish is not None
            answer.token_ids[key] = result.token_ids
            answer.best[key] = [one.top_logprobs for one in result.logprobs]
            answer.num_recomputed += result.finish.num_recomputed_tokens
            answer.num_cached += result.finish.num_cached_tokens
            answer.num_computed += num_computed(submit, result.finish)
            if result.finish.embedding:
                answer.vectors[key] = list(memoryview(result.finish.embedding).cast("f"))
        if work.naps:
            answer.refusals.append(nap(loop, work.lacks))
    if work.fails:
        raise EngineError(work.fails)
    load = loop.load()
    answer.num_swapped = load.swapped_in_blocks_total
    answer.moves = {
        "rebalances": load.rebalances_total,
        "bytes": load.moved_expert_bytes_total,
        "planned": load.rank_balancedness_planned,
    }
    if work.counts:
        loop.sleep()  # what was counted so far is in the history then
        answer.num_picks = sum(unpack_counts(loop.expert_load(AskExperts(0, 0)).picks_LE))
    return answer


def serve(lines: int, answers: int) -> None:
    with os.fdopen(lines, "rb") as file, os.fdopen(answers, "wb") as out:
        for line in file:
            work = msgspec.json.decode(line, type=Work)
            answer = Answer()
            try:
                if work.meeting is None or work.meeting.rank == 0:
                    answer = work_through(work)
                else:
                    with lacking(work.lacks):
                        follow(work.config, work.meeting)
            except EngineError as exc:
                answer = Answer(error=str(exc))
            out.write(msgspec.json.encode(answer) + b"\n")
            out.flush()


def main() -> None:
    configure_logs()
    pipes = [tuple(map(int, pair.split(","))) for pair in sys.argv[1:]]
    for index in range(len(pipes)):
        if os.fork() == 0:
            for other in pipes[:index] + pipes[index + 1 :]:
                os.close(other[0])
                os.close(other[1])
            serve(*pipes[index])
            os._exit(0)
    for pair in pipes:
        os.close(pair[0])
        os.close(pair[1])
    while pipes:
        pid, status = os.wait()
        sys.stdout.write(f"{pid} {os.waitstatus_to_exitcode(status)}\n")
        pipes.pop()


if __name__ == "__main__":
    main()
