"""What the tuner times it also keeps, and what it keeps is what the expert layer is launched with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import THOROUGH

from moiety_kernels.bench.clocks import Prepared, clock_of
from moiety_kernels.bench.shapes import layer_of
from moiety_kernels.cli import _WEIGHTS
from moiety_kernels.gpu.targets import H200
from moiety_kernels.grouped_gemm.tile_cost_model import Problem, candidates, choose
from moiety_kernels.grouped_gemm.tuning import KINDS, GroupedGemmTunable
from moiety_kernels.tuning.choices import path_of, read
from moiety_kernels.tuning.tuner import Tuned, TuningFailed, tune

PROBLEM = Problem(num_experts=3, top_k=2, width=32, hidden=32, tokens=4, element_bytes=4)


class SlowAtFirst:
    """A clock that says that the call prepared first takes longer than the others, however long they take."""

    def prepare(self, call: Any) -> Prepared:
        call()
        return Prepared(call)

    def sample(self, calls: list[Prepared]) -> list[float]:
        return [2e-6 if call is self.first else 1e-6 for call in calls] if hasattr(self, "first") else self._note(calls)

    def _note(self, calls: list[Prepared]) -> list[float]:
        self.first = calls[0]
        return self.sample(calls)


def run(folder: Path, device: str, tunable: Any, clock: Any, **options: Any) -> Tuned[Any]:
    choices = read(path_of(H200.name, folder), H200.name)
    where = torch.device(device)
    settings = {"model": H200, "device": where, "clock": clock, "best": 4, "budget_s": 0.0} | options
    return tune(tunable, PROBLEM, choices, **settings)


def test_the_fastest_candidate_is_kept_and_not_timed_again(tmp_path: Path, device: str) -> None:
    tunable = GroupedGemmTunable()
    first = run(tmp_path, device, tunable, SlowAtFirst())
    preferred = choose(PROBLEM, H200)
    assert first.new
    assert first.candidate != preferred
    assert first.candidate in candidates(PROBLEM, H200)
    assert first.gain == pytest.approx(0.5)
    again = run(tmp_path, device, tunable, clock_of(torch.device(device)))
    assert (again.candidate, again.new) == (first.candidate, False)
    anew = run(tmp_path, device, tunable, clock_of(torch.device(device)), again=True)
    assert anew.new


def test_only_the_best_candidates_of_the_cost_model_are_timed(tmp_path: Path, device: str) -> None:
    found = run(tmp_path, device, GroupedGemmTunable(), SlowAtFirst(), best=1)
    assert found.candidate == choose(PROBLEM, H200)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ("bf16", "int4") else pytest.mark.thorough) for kind in KINDS]
)
def test_weights_kept_in_any_way_can_be_tuned_for(kind: str, tmp_path: Path, device: str) -> None:
    """What is timed multiplies, and is what the layer looks for later."""
    layer, tunable = layer_of((3, 2, 128, 64)), GroupedGemmTunable()
    for problem in tunable.problems(layer, [4], kind):
        makes = tunable.prepare(problem, torch.device(device))
        for config in tunable.candidates(problem, H200)[: 2 if THOROUGH else 1]:
            result = makes(config)()
            assert isinstance(result, torch.Tensor)
            assert result.shape == (4, 128)
            assert result.isfinite().all()
            assert result.any()
    assert tuple(KINDS) == _WEIGHTS


def test_tuning_without_a_runnable_candidate_names_the_problem_and_the_reasons(tmp_path: Path, device: str) -> None:
    class Broken(GroupedGemmTunable):
        def prepare(self, problem: Problem, device: torch.device) -> Any:
            def fail() -> None:
                raise RuntimeError("out of resource: shared memory")

            return lambda config: fail

    with pytest.raises(TuningFailed, match=r"E3 K2 D32 F32, weights of 32 bits, 4 tokens: .*out of resource"):
        run(tmp_path, device, Broken(), clock_of(torch.device(device)))
    assert list(tmp_path.iterdir()) == []
