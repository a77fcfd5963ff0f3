"""Timing of an operation's best candidates on this machine's device; the fastest is kept. Few are timed, in seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from moiety_kernels.bench.clocks import Call, Clock, measure
from moiety_kernels.tuning.choices import Choice, Choices

if TYPE_CHECKING:
    import torch

    from moiety_kernels.bench.shapes import LayerShape
    from moiety_kernels.gpu.targets import DeviceModel

ProblemT = TypeVar("ProblemT")
CandidateT = TypeVar("CandidateT", bound="Candidate")


class TuningFailed(Exception):
    """No candidate of a problem runs; the message names the problem and each candidate's error."""


class Candidate(Protocol):
    """A frozen dataclass of plain values, which are stored."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """Display name that distinguishes it from the others."""


class Tunable(Protocol[ProblemT, CandidateT]):
    """Interface of an operation that can be tuned."""

    operation: str  # name of its package

    def problems(self, shape: LayerShape, tokens: Sequence[int], weights: str) -> list[ProblemT]:
        """Return the problems of a layer of this shape in steps of these token counts.

        `weights` is their format: "bf16", "fp8", "int8", "int4" or "mxfp4".
        """

    def key(self, problem: ProblemT) -> str:
        """Return the key of the choice; problems with one key share it."""

    def candidates(self, problem: ProblemT, model: DeviceModel) -> Sequence[CandidateT]:
        """Return all candidates that run, in the order of the cost model, the best first."""

    def prepare(self, problem: ProblemT, device: torch.device) -> Callable[[CandidateT], Call]:
        """Make the problem's tensors; return a function that makes a call of one candidate on them."""


@dataclass(frozen=True, slots=True)
class Tuned(Generic[CandidateT]):
    """Result of tuning. `gain`: time saved relative to the cost model's own choice, as a fraction."""

    problem: str
    candidate: CandidateT
    time_us: float
    gain: float
    new: bool


def tune(
    tunable: Tunable[ProblemT, CandidateT],
    problem: ProblemT,
    choices: Choices,
    *,
    model: DeviceModel,
    device: torch.device,
    clock: Clock,
    best: int,
    budget_s: float,
    again: bool = False,
) -> Tuned[CandidateT]:
    """Choose for `problem` among the `best` candidates of the cost model, timing them for `budget_s`.

    An existing choice is kept unless `again`. Raises TuningFailed.
    """
    key = tunable.key(problem)
    candidates = tunable.candidates(problem, model)
    kept = None if again else choices.get(tunable.operation, key)
    for one in candidates:
        if kept is not None and asdict(one) == kept.candidate:
            return Tuned(key, one, kept.time_us, gain=0.0, new=False)
    found = _fastest(tunable, problem, candidates[:best], device, clock, budget_s)
    choices.put(tunable.operation, key, Choice(asdict(found.candidate), found.time_us))
    return found


def _fastest(
    tunable: Tunable[ProblemT, CandidateT],
    problem: ProblemT,
    candidates: Sequence[CandidateT],
    device: torch.device,
    clock: Clock,
    budget_s: float,
) -> Tuned[CandidateT]:
    make = tunable.prepare(problem, device)
    names = {str(place): one for place, one in enumerate(candidates)}
    times, failed = measure({name: make(one) for name, one in names.items()}, clock, budget_s=budget_s)
    if not times:
        said = "; ".join(f"{names[name]}: {exc}" for name, exc in failed.items())
        raise TuningFailed(f"no candidate of {tunable.operation} runs for {tunable.key(problem)}: {said}")
    name = min(times, key=lambda one: times[one].seconds)
    first = times[min(times, key=int)].seconds
    taken = times[name].seconds
    return Tuned(tunable.key(problem), names[name], round(1e6 * taken, 2), gain=round(1 - taken / first, 3), new=True)
