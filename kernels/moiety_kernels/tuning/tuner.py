"""Times an operation's candidates on this machine's device and keeps the fastest: few of them, so it takes seconds."""

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
    """No candidate of a problem runs; says which problem, and what each said."""


class Candidate(Protocol):
    """A frozen dataclass of plain values, by which it is kept."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """For people to tell it from the others."""


class Tunable(Protocol[ProblemT, CandidateT]):
    """What an operation offers to be tuned."""

    operation: str  # the name of its package

    def problems(self, shape: LayerShape, tokens: Sequence[int], weights: str) -> list[ProblemT]:
        """Those that a layer of this shape poses in steps of so many tokens; `weights` is how they are
        kept: "bf16", "fp8", "int8", "int4" or "mxfp4"."""

    def key(self, problem: ProblemT) -> str:
        """What the choice is kept under; problems with one key share it."""

    def candidates(self, problem: ProblemT, model: DeviceModel) -> Sequence[CandidateT]:
        """All that run, the one first of which the cost model thinks most."""

    def prepare(self, problem: ProblemT, device: torch.device) -> Callable[[CandidateT], Call]:
        """Makes the problem's tensors; what it returns makes a call that runs one candidate on them."""


@dataclass(frozen=True, slots=True)
class Tuned(Generic[CandidateT]):
    """`gain`: how much less time than the cost model's own choice takes, as a fraction of that."""

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
    """Choose for `problem` among the `best` candidates of the cost model, timing them for `budget_s`; what is chosen
    already is left alone unless `again`. Raises TuningFailed."""
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
