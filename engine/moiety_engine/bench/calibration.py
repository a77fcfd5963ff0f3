"""Calibration behind `moiety bench engine --calibrate`: step times by shape, as a device for the simulator.

Steps of many shapes run on the real loop: prompts alone, decode batches, and prompts beside decode batches. Their times
are fitted by the additive form of `moiety_engine.simulator.devices`, with non-negative coefficients, by least squares
on relative errors.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import msgspec
import numpy as np
import torch

from moiety_engine.bench.engine import make_request
from moiety_engine.bench.lengths import BenchLengths
from moiety_engine.config import EngineConfig, Overlap, PolicyName
from moiety_engine.errors import EngineError
from moiety_engine.loop import EngineLoop
from moiety_engine.model.spec import MoeSpec
from moiety_engine.scheduling.step_time.step_time_model import StepShape, StepTimeModel
from moiety_engine.simulator.devices import SimulatedDevice
from moiety_engine.startup import load_loop
from moiety_wire.engine_choices import Batching

_DECODE_STEPS = 6
_REPEATS = 3
_OUTPUT_TOKENS = 40  # more than the steps of a trial
_COPY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Trial:
    """Requests of one trial.

    `running` requests with `context` prompt tokens each decode, alone and beside prompts of each length in `chunks`;
    with none running, the prompts are alone.
    """

    running: int
    context: int
    chunks: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.running * self.context + _REPEATS * sum(self.chunks)


class _Listener(StepTimeModel):
    """Step-time model that records the shape and time of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[StepShape, float]] = []

    def observe(self, shape: StepShape, seconds: float) -> None:
        self.seen.append((shape, seconds))


def calibrate(
    config: EngineConfig,
    *,
    limit_s: float,
    seed: int,
    on_load: Callable[[int, int], None],
    on_trial: Callable[[int, int], None],
) -> SimulatedDevice:
    """Load the model, run trials of growing size for about `limit_s`, and fit the device.

    Raises EngineError where too few trials ran to separate the coefficients.
    """
    plain = msgspec.structs.replace(
        config, batching=Batching.CONTINUOUS, policy=PolicyName.FCFS, prefix_caching=False, overlap=Overlap.OFF
    )
    with load_loop(plain, progress=on_load) as loop:
        loop.warm_up()
        bench = _Bench(loop, random.Random(seed))
        trials = list_trials(loop)
        observed: list[tuple[StepShape, float]] = []
        begin_s = time.perf_counter()
        for number, trial in enumerate(trials):
            if time.perf_counter() - begin_s > limit_s:
                break
            observed += bench.run(trial)
            on_trial(number + 1, len(trials))
        return _fit(loop, config.name, observed)


def list_trials(loop: EngineLoop) -> list[Trial]:
    """Return the trials in the order of their cost, within memory, context and limits."""
    limits = loop.scheduler.limits
    kv_tokens = loop.scheduler.groups.num_blocks * loop.block_size
    longest = loop.max_context_tokens - _OUTPUT_TOKENS
    lengths = [length for length in (8, 32, 128, 512, 1024, 2048, 4096) if length <= longest]
    chunks = [length for length in lengths if length <= limits.max_batch_tokens]
    trials = [Trial(0, 0, (length,)) for length in chunks]
    for context in lengths:
        for count in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            if count >= limits.max_running or count * (context + _OUTPUT_TOKENS + loop.block_size) > kv_tokens / 2:
                break
            beside = tuple(length for length in chunks if length + count <= limits.max_batch_tokens)
            trials.append(Trial(count, context, beside if context <= 128 else beside[:2]))
    return sorted(trials, key=lambda trial: trial.num_tokens)


class _Bench:
    """Runner of trials on a loop without other users."""

    def __init__(self, loop: EngineLoop, rng: random.Random) -> None:
        self._loop = loop
        self._rng = rng
        self._num_submitted = 0

    def run(self, trial: Trial) -> list[tuple[StepShape, float]]:
        """Return one observation per kind of step: the median of its repetitions."""
        loop, listener = self._loop, _Listener()
        keys = [self._submit(trial.context, _OUTPUT_TOKENS, credit_tokens=1) for _ in range(trial.running)]
        while loop.scheduler.num_paused < trial.running:  # each pauses after its prompt, until all have finished theirs
            loop.step()
        for key in keys:
            loop.extend(key, _OUTPUT_TOKENS, last=True)
        if trial.running:
            loop.step()  # resume them into the batch
        loop.scheduler.step_time = listener
        groups = []
        if trial.running:
            groups.append([self._step(listener) for _ in range(_DECODE_STEPS)])
        for chunk in trial.chunks:
            group = []
            for _ in range(_REPEATS):
                self._submit(chunk, 1, credit_tokens=1)
                group.append(self._step(listener))
            groups.append(group)
        for key in keys:
            loop.abort(key)
        loop.take_outputs()
        return [_middle(group) for group in groups]

    def _step(self, listener: _Listener) -> tuple[StepShape, float]:
        self._loop.step()
        return listener.seen[-1]

    def _submit(self, input_tokens: int, output_tokens: int, *, credit_tokens: int) -> int:
        key = self._num_submitted = self._num_submitted + 1
        request = make_request(self._loop, key, BenchLengths(input_tokens, output_tokens), self._rng)
        self._loop.submit(msgspec.structs.replace(request, credit_tokens=credit_tokens))
        return key


def _middle(group: list[tuple[StepShape, float]]) -> tuple[StepShape, float]:
    """Return the shape of the middle observation, and the median time."""
    return sorted(group, key=lambda item: item[0].decode_context)[len(group) // 2][0], median(s for _, s in group)


def _fit(loop: EngineLoop, name: str, observed: list[tuple[StepShape, float]]) -> SimulatedDevice:
    fraction = _expert_fraction(loop)
    rows = np.array([shape.decode_rows + shape.prefill_rows for shape, _ in observed], dtype=float)
    terms = np.stack(
        [
            np.ones_like(rows),
            1 - (1 - fraction) ** rows if fraction < 1 else np.zeros_like(rows),
            rows,
            np.array([shape.decode_rows for shape, _ in observed], dtype=float),
            np.array([shape.decode_context for shape, _ in observed], dtype=float),
            np.array([shape.attended_pairs for shape, _ in observed], dtype=float),
            np.array([shape.prefill_rows > 0 for shape, _ in observed], dtype=float),
        ],
        axis=1,
    )
    seconds = np.array([s for _, s in observed])
    if len(observed) < 2 * terms.shape[1]:
        raise EngineError(f"{len(observed)} measured step shapes are too few for a calibration; allow more time")
    coefficients = fit_non_negative(terms / seconds[:, None])
    overhead_s, experts_s, token_s, row_s, kv_token_s, pair_s, prefill_step_s = coefficients
    fitted = terms @ np.array(coefficients)
    limits = loop.scheduler.limits
    return SimulatedDevice(
        name=name,
        overhead_s=overhead_s,
        experts_s=experts_s,
        expert_fraction=fraction,
        token_s=token_s,
        row_s=row_s,
        kv_token_s=kv_token_s,
        pair_s=pair_s,
        prefill_step_s=prefill_step_s,
        exponent=1.0,
        kv_tokens=loop.scheduler.groups.num_blocks * loop.block_size,
        block_size=loop.block_size,
        max_batch_tokens=limits.max_batch_tokens,
        max_running=limits.max_running,
        kv_token_bytes=loop.executor.model.kv_bytes_per_block(loop.block_size) // loop.block_size,
        copy_bytes_per_s=_copy_bytes_per_s(loop.executor.model.device),
        fit_error=float(np.mean(np.abs(fitted / seconds - 1))),
    )


def _expert_fraction(loop: EngineLoop) -> float:
    """Return the share of a layer's experts that one token activates; 1 for a dense model."""
    ffns = (layer.ffn for layer in loop.executor.model.spec.layers)
    return next((ffn.routing.top_k / ffn.routing.num_experts for ffn in ffns if isinstance(ffn, MoeSpec)), 1.0)


def fit_non_negative(terms: np.ndarray) -> list[float]:
    """Return the non-negative coefficients for which each row's sum comes nearest to 1.

    Least squares with Lawson and Hanson's active set in its simplest form: negative coefficients are held at zero, the
    most negative first.
    """
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-300)
    active = [index for index in range(terms.shape[1]) if np.any(terms[:, index])]
    while True:
        solution, *_ = np.linalg.lstsq(terms[:, active] / scale[active], np.ones(len(terms)), rcond=None)
        if not len(solution) or solution.min() >= 0:
            break
        active.pop(int(solution.argmin()))
    coefficients = np.zeros(terms.shape[1])
    coefficients[active] = solution / scale[active]
    return [float(value) for value in coefficients]


def _copy_bytes_per_s(device: torch.device) -> float:
    """Return the copy rate between the device and host memory, pinned where that matters."""
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    times = []
    for _ in range(5):
        begin_s = time.perf_counter()
        here.copy_(there)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin_s)
    return _COPY_BYTES / median(times)
