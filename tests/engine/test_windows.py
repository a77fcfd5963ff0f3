"""With a sliding window, features beside plain decoding answer as an engine that frees nothing behind the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moiety_engine.config import EngineConfig
from moiety_engine.errors import InvalidConfig
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import Sampling

from .conftest import make_drafting


def asked(key: int, num_prompt: int, num_output: int = 40) -> CoreSubmit:
    prompt = torch.randint(3, 320, (num_prompt,), generator=torch.Generator().manual_seed(key)).tolist()
    return CoreSubmit(key, "t", STANDARD, prompt, Sampling(temperature=0.0), num_output, 0, [], num_output, b"s", 0)


REQUESTS = [asked(1, 120), asked(2, 60), asked(3, 7), asked(4, 31)]


def answers(loop: EngineLoop) -> dict[int, list[int]]:
    found = {key: result.token_ids for key, result in run_all(loop, REQUESTS).items()}
    assert loop.scheduler.kv.pool.num_used == 0
    return found


def keeping_loop(loops: Any, **settings: Any) -> EngineLoop:
    """A loop of the same model with one cache group, as with a disk tier or padded batching."""
    config = EngineConfig(model=str(loops.folder), name="t", dtype="float32", device="cpu", **settings)
    return load_loop(config)


@pytest.fixture(scope="module")
def kept(windowed_loops: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    loop = keeping_loop(windowed_loops, disk_cache=str(tmp_path_factory.mktemp("disk")))
    assert loop.scheduler.kv.layout.windows == (None,)
    try:
        return answers(loop)
    finally:
        loop.close()


def test_decodes_free_what_they_have_passed(windowed_loops: Any, kept: dict[int, list[int]]) -> None:
    loop = windowed_loops.make(block_size=4)
    assert answers(loop) == kept
    loop.submit(asked(9, 100, 100))
    most = 0
    while not loop.scheduler.idle:
        loop.step()
        most = max(most, loop.scheduler.kv.pool.num_used if loop.scheduler.queues.decoding else 0)
    whole, window = 200 // 4, 20 // 4 + 2
    assert most <= whole + window


def test_drafts_are_verified_within_the_window(
    windowed_loops: Any, sketch_loops: Any, kept: dict[int, list[int]]
) -> None:
    loop = make_drafting(windowed_loops, sketch_loops, speculate_tokens=4, block_size=4)
    assert answers(loop) == kept
    assert loop.load().drafted_tokens_total > 0


def test_padded_batches_keep_what_windows_have_passed(windowed_loops: Any, kept: dict[int, list[int]]) -> None:
    loop = keeping_loop(windowed_loops, batching=Batching.PADDED)
    assert loop.scheduler.kv.layout.windows == (None,)
    assert answers(loop) == kept


def test_a_model_that_was_loaded_to_free_blocks_is_not_served_with_what_keeps_them(
    windowed_loops: Any, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match="load it again"):
        windowed_loops.make(disk_cache=str(tmp_path))
