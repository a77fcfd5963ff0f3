"""A pipeline stage keeps what it sends only until it is sent, and its memory is counted before any request comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moiety_engine.distribution.collectives import DataParallelGroup, Pipeline, Ranks
from moiety_engine.runner.profiling import StepBounds, sent_rows_bytes


class Send:
    """A send that completes when it is told to, or when it is waited for."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.is_done, self.num_waits = x, False, 0

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        self.is_done, self.num_waits = True, self.num_waits + 1


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> list[Send]:
    made: list[Send] = []

    def isend(x: torch.Tensor, rank: int, group: Any = None) -> Send:
        assert rank == 1 and group is None
        made.append(Send(x))
        return made[-1]

    monkeypatch.setattr(dist, "isend", isend)
    return made


def test_what_is_sent_is_freed_before_the_next_tensor_is_kept(sends: list[Send]) -> None:
    pipeline = Pipeline((0, 1), 0, most_pending=2)
    for _ in range(5):
        pipeline.send_to_next_stage(torch.ones(2, 3))
    assert pipeline.num_unsent == 5
    for send in sends[:4]:
        send.is_done = True
    pipeline.send_to_next_stage(torch.ones(2, 3))
    assert pipeline.num_unsent == 2, "only the two that are still on their way"
    assert not any(send.num_waits for send in sends)


def test_sends_are_bounded_by_the_steps_in_flight_and_all_end_with_the_cache(sends: list[Send]) -> None:
    pipeline = Pipeline((0, 1), 0, most_pending=2)
    for _ in range(9):
        pipeline.send_to_next_stage(torch.ones(1))
    assert pipeline.num_unsent == 6
    pipeline.finish_sends()
    assert pipeline.num_unsent == 0
    assert [send.num_waits for send in sends] == [1] * 9


def test_the_rows_of_all_steps_in_flight_are_added_to_the_measured_step() -> None:
    bounds = StepBounds(block_size=16, max_batch_tokens=1000, max_running=8, max_context=4096)

    def model(ranks: Ranks, streams: int | None = None) -> Any:
        several = None if streams is None else SimpleNamespace(num_streams=streams)
        spec = SimpleNamespace(hidden_size=64, streams=several)
        return SimpleNamespace(ranks=ranks, spec=spec, activation_dtype=torch.bfloat16)

    stages = Pipeline((0, 1), 0)
    assert sent_rows_bytes(model(Ranks()), bounds, 1) == 0
    assert sent_rows_bytes(model(Ranks(pipeline=stages)), bounds, 3) == 3 * 1000 * 64 * 2
    groups = Ranks(pipeline=stages, across=DataParallelGroup((0, 1, 2), 0))
    assert sent_rows_bytes(model(groups, streams=4), bounds, 2) == 2 * 334 * 4 * 64 * 2
