"""Marks of the requests whose first token a core computes; they outlive the core."""

from __future__ import annotations

import os
from typing import Any

from moiety_demo import checkpoint_path
from moiety_engine.config import EngineConfig, Overlap
from moiety_engine.first_steps import MAX_KEYS, FirstSteps
from moiety_engine.messages import CoreSubmit
from moiety_engine.startup import load_loop
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import LoadFormat
from moiety_wire.messages import Sampling


def test_the_front_reads_what_the_core_wrote_last() -> None:
    front = FirstSteps()
    assert front.read() is None  # no core has opened it
    core = FirstSteps(os.dup(front.fd))
    assert front.read() == frozenset()
    core.write([7, 2**40])
    assert front.read() == {7, 2**40}
    core.close()
    assert front.read() == {7, 2**40}
    again = FirstSteps(os.dup(front.fd))
    again.write(range(2 * MAX_KEYS))
    assert front.read() == set(range(MAX_KEYS))
    again.close()
    front.close()


def marks_of(overlap: Overlap, **settings: Any) -> list[frozenset[int] | None]:
    """Return the marks after each step of a request that another one joins after its third token."""
    config = EngineConfig(
        model=str(checkpoint_path()),
        name="m",
        device="cpu",
        dtype="float32",
        load_format=LoadFormat.DUMMY,
        kv_memory_bytes=2**23,
        num_threads=1,
        overlap=overlap,
        **settings,
    )
    marks, found = FirstSteps(), []
    with load_loop(config) as loop:
        loop.first_steps = core = FirstSteps(os.dup(marks.fd))
        first = CoreSubmit(1, "t", STANDARD, [5] * 40, Sampling(temperature=0), 9, 0, [], 9, b"", 0)
        loop.submit(first)
        for _ in range(4):
            loop.step()
            found.append(marks.read())
        loop.submit(CoreSubmit(2, "t", STANDARD, [6] * 40, Sampling(temperature=0), 9, 0, [], 9, b"", 0))
        for _ in range(4):
            loop.step()
            found.append(marks.read())
    core.close()
    marks.close()
    return found


def test_a_request_is_marked_while_its_first_token_is_computed() -> None:
    none, one, two = frozenset[int](), frozenset({1}), frozenset({2})
    assert marks_of(Overlap.OFF) == [one, none, none, none, two, none, none, none]


def test_a_first_step_stays_marked_while_an_overlapped_step_may_run() -> None:
    none, one, two = frozenset[int](), frozenset({1}), frozenset({2})
    assert marks_of(Overlap.ON) == [one, one, none, none, two, two, none, none]


def test_a_prompt_that_is_computed_in_parts_is_marked_in_each_of_them() -> None:
    found = marks_of(Overlap.OFF, max_batch_tokens=16)
    assert found[:4] == [frozenset({1})] * 3 + [frozenset()]
