"""Recordings of what a pass computes on a CPU: jobs of our kernels, and the torch operations between them.

A torch operation is recorded if it computes the same function of the same memory each time, with results of the same
shape: its name is in REPEATABLE. Its results are written to the memory that they had when they were recorded. Views and
allocations are not operations. A pass with any other operation cannot be recorded, for instance one that reads a number
of a tensor into Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moiety_kernels.cpu.team import Program, team

if TYPE_CHECKING:
    from collections.abc import Callable

    from moiety_kernels.cpu.team import Job

_ALLOCATIONS = {"empty", "empty_like", "new_empty"}
_QUERIES = {"data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "stride", "__len__"}
_QUERIES |= {"__get__"}  # shape, dtype …
_VIEWS = {"as_strided", "unsqueeze", "view"}
REPEATABLE = {
    *("__add__", "__radd__", "add", "__mul__", "__rmul__", "mul", "__sub__", "sub", "__truediv__", "__neg__", "neg"),
    *("div", "lt", "gt", "ge", "__eq__", "__invert__", "where", "clamp", "argmax", "exp", "tanh", "sigmoid", "gelu"),
    *("sum", "cat", "stack", "roll", "pad", "clone", "contiguous", "flatten", "reshape", "layer_norm", "zeros_like"),
    *("float", "double", "int", "long", "bool", "to", "arange", "searchsorted", "repeat_interleave"),
    *("index_select", "index_copy_", "__getitem__"),
    *("split", "chunk", "tensor_split", "squeeze", "expand", "unbind"),  # views in general
}
_INTO: dict[str, Any] = {  # the same functions, which can write to given memory
    **dict.fromkeys(("__add__", "__radd__", "add"), torch.add),
    **dict.fromkeys(("__mul__", "__rmul__", "mul"), torch.mul),
    **dict.fromkeys(("__neg__", "neg"), torch.neg),
    **{"__truediv__": torch.div, "cat": torch.cat, "exp": torch.exp, "index_select": torch.index_select},
    **{"sigmoid": torch.sigmoid, "tanh": torch.tanh},
}


class TorchCall:
    """A torch operation that can be run again, which writes its results to the same memory each time."""

    __slots__ = ("_args", "_function", "_kwargs", "_results")

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Tensor, ...]
    ) -> None:
        """Create the call. `results`: those of the recorded run, whose memory is kept; () for an operation in place."""
        into = _INTO.get(function.__name__)
        if into is not None and len(results) == 1:
            function, kwargs, results = into, {**kwargs, "out": results[0]}, ()
        self._function, self._args, self._kwargs, self._results = function, args, kwargs, results

    def run(self) -> None:
        """Run the operation on the current contents of its arguments."""
        found = self._function(*self._args, **self._kwargs)
        if self._results:
            for kept, new in zip(self._results, _tensors(found), strict=True):
                kept.copy_(new)


@dataclass(slots=True)
class PassRecording:
    """Operations of a part of a pass, in order, and the tensors that it allocated.

    `calls` has each torch operation with the number of jobs before it.
    """

    jobs: list[Job]
    calls: list[tuple[int, TorchCall]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    is_repeatable: bool = True
    result_bytes: int = 0  # of results of torch operations

    @property
    def only_kernels(self) -> bool:
        """True if torch computed nothing."""
        return self.is_repeatable and not self.calls


class PassProgram:
    """Recorded parts of a pass that run again one after the other, without Python between the jobs."""

    def __init__(self, *recordings: PassRecording) -> None:
        """Create the program. The caller keeps the tensors of the recordings alive."""
        steps: list[Job | TorchCall] = []
        for one in recordings:
            begin = 0
            for place, call in one.calls:
                steps += [*one.jobs[begin:place], call]
                begin = place
            steps += one.jobs[begin:]
        self._parts = _parts_of(steps)
        self._jobs = self._parts[0] if len(self._parts) == 1 and isinstance(self._parts[0], Program) else None
        self._team = team()

    @property
    def num_jobs(self) -> int:
        """Number of jobs of kernels that a run has."""
        return sum(part.num_jobs for part in self._parts if isinstance(part, Program))

    @property
    def num_torch_calls(self) -> int:
        """Number of torch operations that a run calls."""
        return sum(isinstance(part, TorchCall) for part in self._parts)

    def replay(self) -> None:
        """Run the parts on the current contents of their tensors."""
        if self._jobs is not None:
            self._team.replay(self._jobs)
            return
        with torch.inference_mode():
            for part in self._parts:
                if isinstance(part, Program):
                    self._team.replay(part)
                else:
                    part.run()


class _Watch(TorchFunctionMode):
    """Function mode that keeps allocated tensors and records what torch itself computes."""

    def __init__(self, recording: PassRecording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.__name__
        if name in _ALLOCATIONS:
            self._recording.tensors.append(result)
        elif name not in _QUERIES | _VIEWS:
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        recording, name, results = self._recording, func.__name__, _tensors(result)
        if name not in REPEATABLE or not results or _shape_depends_on_values(name, args):
            recording.is_repeatable = False
            return
        if name.endswith("_") and not name.endswith("__"):
            results = ()
        elif _is_view(results, args):
            return
        recording.result_bytes += sum(one.nbytes for one in results)
        recording.calls.append((len(recording.jobs), TorchCall(func, args, kwargs, results)))


def record_pass(compute: Callable[[], Tensor]) -> tuple[Tensor, PassRecording]:
    """Run `compute`, and return its result with what it has computed."""
    with team().recording() as jobs:
        recording = PassRecording(jobs)
        with _Watch(recording):
            result = compute()
    return result, recording


def _parts_of(steps: Sequence[Job | TorchCall]) -> list[Program | TorchCall]:
    """Return the steps with each run of consecutive jobs as one program."""
    parts: list[Program | TorchCall] = []
    jobs: list[Job] = []
    for step in steps:
        if not isinstance(step, TorchCall):
            jobs.append(step)
            continue
        if jobs:
            parts.append(Program(jobs))
            jobs = []
        parts.append(step)
    return [*parts, Program(jobs)] if jobs else parts


def _tensors(result: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a result; () if it has anything else."""
    found = tuple(result) if isinstance(result, list | tuple) else (result,)
    return found if all(isinstance(one, Tensor) for one in found) else ()


def _is_view(results: tuple[Tensor, ...], args: tuple[Any, ...]) -> bool:
    """Return whether the results are in the memory of the first argument, so that nothing was computed."""
    if not args or not isinstance(args[0], Tensor):
        return False
    memory = args[0].untyped_storage().data_ptr()
    return all(one.untyped_storage().data_ptr() == memory for one in results)


def _shape_depends_on_values(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether the result of this operation has a shape that follows from values of its arguments."""
    if name == "where":
        return len(args) < len(("condition", "input", "other"))
    if name == "repeat_interleave":
        return len(args) < 2 or not isinstance(args[1], int)
    if name != "__getitem__":
        return False
    indices = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(one, Tensor) and one.dtype is torch.bool for one in indices)
