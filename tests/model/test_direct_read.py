"""Tensors that are needed as they are on disk are read directly into place, and no others are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moiety_engine.model.direct_read import DirectRead
from moiety_engine.model.errors import WeightsError
from moiety_engine.model.names.tensor_mapping import Chosen, Shares, TensorMapping, reshaped, whole

ROWS, WIDTH = 12, 40


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"odd": torch.randn(3), "float": torch.randn(ROWS, WIDTH), "brain": torch.randn(ROWS, WIDTH).bfloat16()}


@pytest.fixture
def file(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("most_at_once", [7, 100, 1 << 20])
def test_parts_of_any_size_come_to_the_very_tensors(file: Path, tensors: dict[str, Tensor], most_at_once: int) -> None:
    stack = torch.full((3, ROWS, WIDTH), float("nan"))
    views = {"odd": torch.empty(3), "float": stack[1], "brain": torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)}
    straight = DirectRead(most_at_once)
    assert all(straight.take(file, name, whole(view)) for name, view in views.items())
    assert sum(straight.read(2)) == sum(view.nbytes for view in views.values())
    assert all(torch.equal(view, tensors[name]) for name, view in views.items())
    assert stack[0].isnan().all()
    assert stack[2].isnan().all()


def test_direct_read_leaves_tensors_that_need_conversion_to_the_normal_loader(file: Path) -> None:
    float_ND, straight = torch.empty(ROWS, WIDTH), DirectRead()
    assert not straight.take(file, "float", whole(float_ND.bfloat16()))
    assert not straight.take(file, "float", whole(torch.empty(WIDTH, ROWS).mT))
    assert not straight.take(file, "float", whole(torch.empty(ROWS, WIDTH + 1)))
    assert not straight.take(file, "float", reshaped(float_ND, (WIDTH, ROWS)))
    assert not straight.take(file, "float", TensorMapping(float_ND, (ROWS, WIDTH), chosen=Chosen(slice(0, ROWS), ROWS)))
    assert not straight.take(file, "float", Shares((float_ND,), (ROWS, WIDTH), lambda one: (one,)))
    assert list(straight.read(2)) == []


def test_a_file_that_ends_too_soon_is_refused(file: Path) -> None:
    straight = DirectRead()
    assert straight.take(file, "brain", whole(torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)))  # the last in the file
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(WeightsError, match="not a complete safetensors file"):
        list(straight.read(2))
