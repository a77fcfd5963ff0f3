"""Random adapters in PEFT's format, for benchmarks and tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moiety_engine.adapters.peft import CONFIG, TENSORS
from moiety_engine.model.checkpoint import tensor_files

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_adapter(
    folder: Path,
    checkpoint: Path,
    *,
    modules: tuple[str, ...] = ATTENTION,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    strength: float = 0.3,
    **config: Any,
) -> Path:
    """Write a random adapter for all modules of the checkpoint whose last name is in `modules`, and return `folder`.

    `config`: further entries of the adapter's configuration.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, path in sorted(tensor_files(checkpoint).items()):
        module, _, kind = name.rpartition(".")
        if kind != "weight" or module.rpartition(".")[2] not in modules:
            continue
        with safe_open(path, framework="pt") as file:
            rows, columns = file.get_slice(name).get_shape()
        found[f"base_model.model.{module}.lora_A.weight"] = _normal(generator, rank, columns) * columns**-0.5
        found[f"base_model.model.{module}.lora_B.weight"] = _normal(generator, rows, rank) * strength
    folder.mkdir(parents=True, exist_ok=True)
    save_file(found, folder / TENSORS)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        "target_modules": sorted(modules),
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / CONFIG).write_text(json.dumps(described | config))
    return folder


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)
