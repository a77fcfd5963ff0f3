"""Processes of ranks: `python -m tests.engine.rank SILENCE_S IN,OUT …` starts one process for each pair of pipes.

Each process serves one rank group after the other, so that the ranks of many tests import torch once. A rank may be
silent for SILENCE_S. An input line is (configuration, rendezvous, requests). Rank 0 answers with a line of results."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
from tests.engine.adapter_gate import AdapterGate
from tests.engine.micro_batch_turns import Turns

from moiety_engine import memory
from moiety_engine.assembly import follow
from moiety_engine.config import EngineConfig
from moiety_engine.disk import folder
from moiety_engine.distribution import rank_heartbeat as heartbeat
from moiety_engine.distribution.collectives import TransferGroup
from moiety_engine.distribution.layout import layout_of
from moiety_engine.distribution.rendezvous_address import Rendezvous
from moiety_engine.errors import CheckpointError, EngineError, OutOfMemory, SleepFileError
from moiety_engine.logs import configure_logs
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreFinish, CoreLoad, CoreSubmit
from moiety_engine.model import adapter_modules, weight_offload
from moiety_engine.model.adapter_stacks import AdapterStacks
from moiety_engine.model.expert_migration import SlotWeights
from moiety_engine.model.weight_file import WeightFile
from moiety_engine.model.weight_offload import WeightOffload, named_tensors
from moiety_engine.offline import run_all
from moiety_engine.runner import adapter_loading
from moiety_engine.runner.checkpoint_weights import CheckpointWeights
from moiety_engine.startup import load_loop
from moiety_kernels.cpu import paths
from moiety_wire.experts import ExpertLoadQuery, unpack_counts

WORKER = "moiety_engine.distribution.rank_processes.MODULE"  # of ranks that rank 0 starts
NEW_RANKS = {"new ranks": "none", "groups": "tests.engine.dying_expert_rank"}  # modules by what they lack


class Work(msgspec.Struct):
    config: EngineConfig
    rendezvous: Rendezvous | None
    waves: list[list[CoreSubmit]]  # one after the other
    naps: bool = False  # between waves
    again: bool = False  # and again, until it is stopped
    served: str = ""  # a file that is written after the first wave
    counts: bool = False  # experts' picks
    hurries: float = 0.0  # seconds by which the loop's clock advances at each reading
    shuffles: bool = False  # experts are moved to random slots all the time
    scales: list[int] = []  # numbers of expert ranks, one after the other; with `again`, until all were tried
    arranges: bool = False  # an adapter on rank 0 while the number of expert ranks changes for the first time
    fails: str = ""  # rank 0 raises this error
    lacks: str = ""  # on rank 1 `weights`, `host`, `device`, `slots`, `parts`, `moves` (memory for them), `links` (for
    # moves); on all `cache`, `disk`; first `new ranks` or their `groups`; `itself`: another rank ends as it allocates
    exact: bool = False  # products do not round rows to bfloat16
    some_fail: bool = False  # requests, and the others are answered; needed with `arranges`
    adapters: dict[str, str] = {}  # folders of adapters that are registered while the engine serves
    offloaded: tuple[int, int, int] = (0, 0, 0)  # slots, hits and misses of experts, which ranks report with a delay
    aborts: list[int] = []  # keys of requests that are aborted while a step decodes them
    turns: str = ""  # a folder in which each rank with attention notes what it sends; experts wait for the next note


class Answer(msgspec.Struct):
    """The outputs of all requests. `best` has the log-probabilities of each token's two best logits, by request."""

    error: str = ""
    token_ids: dict[int, list[int]] = {}
    best: dict[int, list[list[float]]] = {}
    num_recomputed: int = 0
    num_cached: int = 0
    num_swapped: int = 0
    num_accepted: int = 0  # draft tokens
    weight_bytes: int = 0
    num_computed: int = 0  # tokens
    num_picks: int = 0  # of experts, counted for them
    vectors: dict[int, list[float]] = {}
    refusals: list[str] = []
    failed: dict[int, str] = {}  # codes
    reasons: dict[int, str] = {}  # messages of failures
    num_waited: int = 0  # layers of micro-batches that experts gave back only once others had been sent
    waited_s: list[float] = []  # of attention and of experts, each for the other
    moves: dict[str, float] = {}  # of experts between ranks, what the engine tells of them
    num_excluded: int = 0  # ranks
    expert_ranks: list[int] = []  # after each change that was asked for
    scaling_problems: list[str] = []
    most_in_flight: int = 0  # steps
    num_aborted: int = 0
    num_used_blocks: int = 0  # at the end
    num_evictions: int = 0  # of adapters
    num_slots: int = 0  # of adapters
    num_expert_misses: int = 0  # on all ranks, of offloaded experts
    num_expert_hits: int = 0
    num_expert_slots: int = 0
    num_restored: int = 0  # blocks, from the disk
    disk: dict[str, int] = {}  # files lost and failed writes


def refusal(do: Callable[[], object]) -> str:
    try:
        do()
    except (OutOfMemory, SleepFileError) as exc:
        return str(exc)
    return ""


def nap(loop: EngineLoop, lacks: str) -> str:
    """Sleep and wake; return the error if memory, or the file of the weights, was missing."""
    said = refusal(loop.sleep) if lacks == "host" else ""
    assert not loop.asleep
    if lacks == "host":
        return said
    loop.sleep()
    assert not loop.executor.model.ranks.pipeline.num_unsent, "what is sent is freed with the cache"
    fitting = loop.executor.sizes
    if lacks == "cache":
        loop.executor.sizes = replace(fitting, num_blocks=1 << 50)
    if lacks and lacks != "file":
        with lacking("both") if lacks == "own file" else contextlib.nullcontext():
            said = refusal(loop.wake)
        assert loop.asleep
    loop.executor.sizes = fitting
    loop.wake()
    return said


@contextlib.contextmanager
def lacking(what: str) -> Iterator[None]:
    """Let a rank other than the first run out of memory. On a device every second attempt succeeds."""
    whole = WeightOffload.reload_weights
    tries = itertools.count()

    def reload_weights(self: WeightOffload, *given: Any) -> None:
        if next(tries) % 2 == 0:
            raise OutOfMemory("there is no room")
        whole(self, *given)

    read = WeightFile.read

    def read_file(self: WeightFile, *given: Any) -> None:
        if what == "file" or next(tries) % 2 == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        read(self, *given)

    prepared = AdapterStacks.prepare

    def prepare(self: AdapterStacks, *layout: Any) -> Any:
        if what == "itself":
            os._exit(1)
        if next(tries) % 2 == 0:
            raise RuntimeError("there is no room")
        return prepared(self, *layout)

    arranged = adapter_modules.rank_factors

    def rank_factors(*given: Any) -> Any:
        if next(tries) % 2 == 0:
            raise KeyError("no such part")
        return arranged(*given)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with contextlib.ExitStack() as stack:
        if what == "host":
            stack.enter_context(patch.object(weight_offload, "available_bytes", lambda: 0))
        if what == "disk":
            stack.enter_context(patch.object(folder, "write_file", full))
        if what == "moves":
            stack.enter_context(patch.object(SlotWeights, "prepare", side_effect=RuntimeError("no room")))
        if what == "links":
            stack.enter_context(patch.object(TransferGroup, "exchange", side_effect=RuntimeError("no room")))
        if what == "weights":
            stack.enter_context(patch.object(memory, "available_bytes", lambda: 0))
        if what == "parts":
            stack.enter_context(patch.object(adapter_loading, "rank_factors", rank_factors))
        if what in ("slots", "itself"):
            stack.enter_context(patch.object(AdapterStacks, "prepare", prepare))
        if what in ("file", "both"):
            stack.enter_context(patch.object(WeightFile, "read", read_file))
        if what == "both":
            no_file = CheckpointError("no such file")
            stack.enter_context(patch.object(CheckpointWeights, "load", side_effect=no_file))
        if what == "device":
            stack.enter_context(patch.object(WeightOffload, "reload_weights", reload_weights))
        yield


def num_computed(submit: CoreSubmit, finish: CoreFinish) -> int:
    """Return the number of a request's tokens that the model computed: all but the last one."""
    num_tokens = len(submit.prompt_ids) + max(0, finish.num_output_tokens - 1)
    return num_tokens - finish.num_cached_tokens + finish.num_recomputed_tokens


def shuffler(loop: EngineLoop) -> Callable[[int], None]:
    """Return a function that gives experts a new random placement, some with many replicas, as soon as the last is
    reached."""
    assert loop.experts.rebalancing is not None
    balancer, rng = loop.experts.rebalancing.balancer, np.random.default_rng(0)

    def shuffle(_: int) -> None:
        shape = balancer.placement
        if balancer.is_moving:
            return
        for layer in range(shape.num_layers):
            spare = rng.choice(rng.integers(0, shape.num_experts, 2), shape.num_slots - shape.num_experts)
            balancer.aim(layer, rng.permutation(np.concatenate([np.arange(shape.num_experts), spare])))

    return shuffle


def scaler(loop: EngineLoop, work: Work, answer: Answer, gate: AdapterGate) -> Callable[[int], None]:
    """Return a function that asks for the next number of expert ranks once the last one is there or was refused."""
    left, scaling = list(work.scales), loop.experts.scaling

    def scale(_: int) -> None:
        if work.arranges and not gate.is_arranging:
            return
        if not scaling.is_under_way and len(answer.expert_ranks) < len(work.scales):
            if len(left) < len(work.scales):
                answer.expert_ranks.append(loop.load().expert_ranks)
                answer.scaling_problems.append(scaling.problem)
                gate.open()
            lacks = "" if len(left) < len(work.scales) else work.lacks
            with patch(WORKER, NEW_RANKS.get(lacks, "moiety_engine.core.worker")):
                if left:
                    loop.scale_expert_ranks(left.pop(0))

    return scale


def watcher(loop: EngineLoop, work: Work, answer: Answer) -> Callable[[int], None]:
    """Return a function that counts the steps in flight, and aborts requests that one of them decodes."""
    left = set(work.aborts)

    def watch(_: int) -> None:
        answer.most_in_flight = max(answer.most_in_flight, len(loop._flights))
        decoded = {c.sequence.key for one in loop._flights for c in one.plan.chunks[: one.plan.num_decode]}
        for key in left & decoded:
            loop.abort(key)
            answer.num_aborted += 1
            left.remove(key)

    return watch


def work_through(work: Work) -> Answer:
    hasty = itertools.count(time.time_ns(), int(1e9 * work.hurries))
    clock_ns = hasty.__next__ if work.hurries else time.time_ns
    load = partial(load_loop, work.config, rendezvous=work.rendezvous, clock_ns=clock_ns)
    with AdapterGate(closed=work.arranges) as gate, load() as loop:
        return answer_of(work, loop, gate)


def waited_s(loop: EngineLoop) -> list[float]:
    """Return the seconds that attention and experts waited, once experts have reported, which they do twice a
    second."""
    end_s = time.monotonic() + 120
    while not (load := loop.load()).experts_waited_seconds_total and time.monotonic() < end_s:
        time.sleep(0.05)
    return [load.attention_waited_seconds_total, load.experts_waited_seconds_total]


def load_with_experts(loop: EngineLoop, least: tuple[int, int, int]) -> CoreLoad:
    """Return the load once the ranks have reported so many slots, hits and misses of offloaded experts."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        load = loop.load()
        figures = load.expert_slots, load.expert_hits_total, load.expert_misses_total
        if all(figure >= wanted for figure, wanted in zip(figures, least, strict=True)):
            break
        time.sleep(0.05)
    return load


def settle_disk(loop: EngineLoop) -> None:
    """Run steps until everything is on disk."""
    end_s = time.monotonic() + 120
    while loop.waits_for_others:
        loop.step()
        assert time.monotonic() < end_s, "something is on its way for ever"


def step_through(loop: EngineLoop, wave: list[CoreSubmit], answer: Answer, on_step: Callable[[int], None]) -> None:
    """Run steps until all requests have ended, some of them with a failure."""
    for submit in wave:
        answer.token_ids[submit.key], answer.best[submit.key] = [], []
        loop.submit(submit)
    num_open = len(wave)
    while num_open:
        if not loop.step():
            time.sleep(0.001)  # other threads need the interpreter
        on_step(len(wave) - num_open)
        step = loop.take_outputs()
        for output in step.outputs if step else ():
            answer.token_ids[output.key] += output.token_ids
            answer.best[output.key] += [one.top_logprobs for one in output.logprobs or []]
            num_open -= output.finish is not None
        for failure in step.failures if step else ():
            answer.failed[failure.key], answer.reasons[failure.key] = failure.code, failure.message
            num_open -= 1


def answer_of(work: Work, loop: EngineLoop, gate: AdapterGate) -> Answer:
    answer = Answer()
    loop.warm_up()
    for name, path in work.adapters.items():
        loop.intake.adapters.learn(name, Path(path))
    storages = {tensor.untyped_storage() for _, tensor in named_tensors(loop.executor.model._weights)}
    answer.weight_bytes = sum(storage.nbytes() for storage in storages)
    on_step = shuffler(loop) if work.shuffles else watcher(loop, work, answer)
    on_step = scaler(loop, work, answer, gate) if work.scales else on_step
    for wave in work.waves if work.some_fail else ():
        step_through(loop, wave, answer, on_step)
    answer.num_slots = len(loop.intake.adapters.slots)
    if work.some_fail:
        return answer
    for wave in itertools.cycle(work.waves) if work.again else work.waves:
        for submit, (key, result) in zip(wave, run_all(loop, wave, on_step=on_step).items(), strict=True):
            assert result.finish is not None
            answer.token_ids[key] = result.token_ids
            answer.best[key] = [one.top_logprobs for one in result.logprobs]
            answer.num_recomputed += result.finish.num_recomputed_tokens
            answer.num_cached += result.finish.num_cached_tokens
            answer.num_computed += num_computed(submit, result.finish)
            if result.finish.embedding:
                answer.vectors[key] = list(memoryview(result.finish.embedding).cast("f"))
        if work.served:
            Path(work.served).touch()
        has_failed = work.lacks == "links" and loop.load().failed_expert_moves_total
        has_scaled = work.scales and len(answer.expert_ranks) == len(work.scales)
        if has_failed or (has_scaled and len(answer.token_ids) == sum(map(len, work.waves))):
            break
        if work.naps:
            answer.refusals.append(nap(loop, work.lacks))
    if work.turns:
        answer.waited_s = waited_s(loop)
    settle_disk(loop)
    if work.fails:
        raise EngineError(work.fails)
    load = loop.load()
    answer.num_swapped = load.swapped_in_blocks_total
    answer.num_accepted = load.accepted_tokens_total
    answer.num_excluded = load.excluded_ranks
    answer.num_used_blocks = loop.scheduler.groups.num_used
    load = load_with_experts(loop, work.offloaded)
    answer.num_expert_misses, answer.num_expert_hits = load.expert_misses_total, load.expert_hits_total
    answer.num_expert_slots = load.expert_slots
    answer.num_evictions = loop.intake.adapters.evictions_total
    answer.num_slots = len(loop.intake.adapters.slots)
    answer.num_restored = load.disk_restored_blocks_total
    answer.disk = {"lost": load.disk_lost_files_total, "failed": load.disk_failed_writes_total}
    answer.moves = {
        "rebalances": load.rebalances_total,
        "bytes": load.moved_expert_bytes_total,
        "failed": load.failed_expert_moves_total,
        "planned": load.rank_balancedness_planned,
        "switch_s": load.expert_rank_switch_seconds_total,
    }
    if work.counts:
        loop.sleep()  # by then the history has all counts so far
        answer.num_picks = sum(unpack_counts(loop.expert_load(ExpertLoadQuery(0, 0)).picks_LE))
    return answer


def answer_by(work: Work) -> Answer:
    turns = Turns(Path(work.turns), layout_of(work.config))
    rank = 0 if work.rendezvous is None else work.rendezvous.rank
    with contextlib.ExitStack() as stack:
        if work.turns:
            stack.enter_context(turns.kept(rank))
        if work.lacks == "links":
            stack.enter_context(patch("moiety_engine.distribution.rank_group.LONGEST_TRANSFER", timedelta(seconds=3)))
        if work.exact:
            stack.enter_context(patch.object(paths, "is_usable", lambda path: path is paths.FLOATS))
        if work.rendezvous is None or rank == 0:
            return work_through(work)
        with lacking(work.lacks):
            follow(work.config, work.rendezvous)
        return Answer(num_waited=turns.num_waited)


def serve(lines: int, answers: int) -> None:
    with os.fdopen(lines, "rb") as file, os.fdopen(answers, "wb") as out:
        for line in file:
            work = msgspec.json.decode(line, type=Work)
            try:
                answer = answer_by(work)
            except EngineError as exc:
                answer = Answer(error=str(exc))
            out.write(msgspec.json.encode(answer) + b"\n")
            out.flush()


def main() -> None:
    configure_logs()
    heartbeat.SILENCE_S = float(sys.argv[1])
    pipes = [tuple(map(int, pair.split(","))) for pair in sys.argv[2:]]
    gc.collect()
    gc.freeze()  # a rank collects garbage at its end, and must not copy the pages of all imported modules
    for index in range(len(pipes)):
        if os.fork() == 0:
            for end in itertools.chain(*pipes[:index], *pipes[index + 1 :]):
                os.close(end)
            serve(*pipes[index])
            os._exit(0)
    for end in itertools.chain(*pipes):
        os.close(end)
    while pipes:
        pid, status = os.wait()
        sys.stdout.write(f"{pid} {os.waitstatus_to_exitcode(status)}\n")
        pipes.pop()


if __name__ == "__main__":
    main()
