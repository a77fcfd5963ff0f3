"""A prompt with images has the same answer on several ranks as on one: each rank encodes the images that it is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tests.engine.rank_processes import RankProcesses, assert_same, ranks_of, settings_of
from tests.vision_checkpoint import END, IMAGE, START, write_checkpoint

from moiety_engine.images.prompt_images import PromptImage
from moiety_engine.messages import CoreSubmit
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

SIDE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose stacks of experts are transposed, as published ones are."""
    folder = tmp_path_factory.mktemp("vision")
    write_checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].mT.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    started = RankProcesses(4, silence_s=120)
    yield started
    started.end()


def request(key: int, rows: int, columns: int, seed: int) -> CoreSubmit:
    prompt = [3 + (i * 7 + key) % 370 for i in range(9)]
    start = len(prompt) + 1
    prompt += [START, *[IMAGE] * (rows * columns), END, *(5 + (key * 31 + i) % 360 for i in range(4 + key))]
    shape = rows * SIDE, columns * SIDE, 3
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8).tobytes()
    digest = hashlib.blake2b(pixels, digest_size=32).digest()
    images = [PromptImage(start, rows, columns, shape[0], shape[1], digest, pixels)]
    sampling = Sampling(temperature=0.0, num_logprobs=2)
    return CoreSubmit(key, "t", STANDARD, prompt, sampling, 8, 0, [], 8, b"s", 0, images=images)


@pytest.fixture(scope="module")
def waves() -> list[list[CoreSubmit]]:
    first = [request(1, 3, 4, 1), request(2, 2, 5, 2), request(3, 3, 4, 1), request(4, 4, 3, 3)]
    return [first, [msgspec.structs.replace(first[0], key=9), request(5, 3, 4, 7)]]


@pytest.fixture(scope="module")
def alone(processes: RankProcesses, folder: Path, waves: list[list[CoreSubmit]]) -> dict[str, Any]:
    (said,) = processes.work(*ranks_of(settings_of(folder)), waves=waves)
    return dict(said)


LAYOUTS = [
    pytest.param({"tp": 2}, marks=pytest.mark.thorough),
    {"tp": 2, "ep": 2},
    {"pp": 2},
    {"dp_attention": 2, "ep": 2},
    {"tp": 2, "ffn_ranks": 2, "ep": 2},
    {"prefill_context_parallel": 2, "ep": 2},
    pytest.param({"tp": 4, "decode_context_parallel": 2}, marks=pytest.mark.thorough),
    pytest.param({"tp": 4, "ep": 2, "decode_context_parallel": 2}, marks=pytest.mark.thorough),
    pytest.param({"dp_attention": 2, "ffn_ranks": 2, "ep": 2}, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_images_over_several_ranks_get_what_they_get_on_one(
    processes: RankProcesses, folder: Path, waves: list[list[CoreSubmit]], alone: dict[str, Any], layout: dict[str, int]
) -> None:
    ours, *others = processes.work(*ranks_of(settings_of(folder, **layout)), waves=waves)
    assert_same(alone, ours)
    assert not any(other["error"] for other in others)
