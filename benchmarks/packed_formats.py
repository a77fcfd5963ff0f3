"""Throughput of AWQ and GPTQ checkpoints beside 4-bit weights as Moiety writes them, in `moiety bench engine`.

    python benchmarks/packed_formats.py MODEL FOLDER --out benchmarks/results/packed_formats.json

MODEL is a checkpoint in 16 bits (`benchmarks/checkpoint.py`). The checkpoints that are written to FOLDER have its
weights rounded to 4 bits: AWQ with zero points and GPTQ symmetric, in groups of 128 inputs as they are published, GPTQ
also with act-order (`desc_act`), and `pack-quantized` in groups of 32 as `moiety quantize` writes it. They run in turn,
in separate processes. Needs a `moiety` command in the same environment.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BITS = 4
GROUPS = {"int4": 32, "awq": 128, "gptq": 128, "gptq_act_order": 128}
MOST = 2**BITS - 1
INPUT_TOKENS, OUTPUT_TOKENS = 32, 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output in each place of a word, the lowest bits first
PRODUCTS: tuple[str, ...] = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
PRODUCTS += ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_WEIGHTS = {"type": "int", "num_bits": BITS, "strategy": "group", "group_size": GROUPS["int4"], "symmetric": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
        "ignore": ["lm_head"],
    },
    "awq": {"quant_method": "awq", "bits": BITS, "group_size": GROUPS["awq"], "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": BITS, "group_size": GROUPS["gptq"], "sym": True, "desc_act": False},
}
SETTINGS["gptq_act_order"] = SETTINGS["gptq"] | {"desc_act": True}
JOINED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # matrices with the inputs of another one


def words(numbers: Tensor) -> Tensor:
    """Return numbers of 4 bits in the last dimension as int32 words, lowest bits first."""
    parts = numbers.int().reshape(*numbers.shape[:-1], -1, 8)
    packed = torch.zeros(parts.shape[:-1], dtype=torch.int32)
    for place in range(8):
        packed |= parts[..., place] << BITS * place
    return packed


def rounded(weight_NK: Tensor, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers [N, K], and scales and zero points [N, G]."""
    grouped = weight_NK.float().reshape(len(weight_NK), -1, group)
    least, greatest = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    if symmetric:
        scales = (torch.maximum(greatest, -least) * 2 / MOST).half().float()
        zeros = torch.full_like(scales, 2 ** (BITS - 1))
    else:
        scales = ((greatest - least) / MOST).half().float()
        zeros = (-least / scales).round().clamp(0, MOST)
    numbers = (grouped / scales[..., None]).round() + zeros[..., None]
    return numbers.clamp(0, MOST).flatten(1), scales, zeros


def order_of(module: str, width: int) -> Tensor:
    """Return the inputs of a matrix by importance, which is random; joined matrices have the same order."""
    for name, other in JOINED.items():
        module = module.replace(name, other)
    return torch.randperm(width, generator=torch.manual_seed(zlib.crc32(module.encode())))


def tensors_of(method: str, module: str, weight_NK: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint of the method has in place of a weight."""
    width = weight_NK.shape[1]
    order_K = order_of(module, width) if method == "gptq_act_order" else torch.arange(width)
    numbers, scales, zeros = rounded(weight_NK[:, order_K], GROUPS[method], symmetric=method != "awq")
    numbers = torch.empty_like(numbers).index_copy_(1, order_K, numbers)
    if method == "int4":
        shape = torch.tensor(weight_NK.shape)
        return {
            f"{module}.weight_packed": words(numbers),
            f"{module}.weight_scale": scales.bfloat16(),
            f"{module}.weight_shape": shape,
        }
    if method == "awq":
        packed = [
            words(part.T.reshape(part.shape[1], -1, 8)[..., list(AWQ_ORDER)].flatten(-2)) for part in (numbers, zeros)
        ]
    else:
        packed = [words(numbers).T.contiguous(), words((zeros - 1).T.contiguous())]
    parts = {"qweight": packed[0], "qzeros": packed[1], "scales": scales.T.half().contiguous()}
    if method != "awq":
        parts["g_idx"] = torch.empty(width, dtype=torch.int32)
        parts["g_idx"][order_K] = torch.arange(width, dtype=torch.int32) // GROUPS[method]
    return {f"{module}.{end}": part for end, part in parts.items()}


def write(method: str, model: Path, folder: Path) -> None:
    """Write a copy of the model in the format of the method."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, folder)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS[method]}))
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.endswith(PRODUCTS):
            tensors |= tensors_of(method, name.removesuffix(".weight"), tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def measure(model: Path, prompts: int) -> float:
    """Return the output tokens per second of one run of `moiety bench engine`. Raises CalledProcessError."""
    command = [str(Path(sys.executable).parent / "moiety"), "bench", "engine", "--model", str(model), "--json"]
    command += ["--dtype", "bfloat16", "--num-prompts", str(prompts)]
    command += ["--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["output_tokens_per_s"])


def main() -> None:
    """Write the checkpoints, run all formats in turn, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    folders = {method: args.folder / method for method in SETTINGS}
    torch.set_num_threads(1)
    for method in SETTINGS:
        write(method, args.model, folders[method])
    found: dict[str, dict[str, list[float]]] = {str(n): {kind: [] for kind in folders} for n in args.prompts}
    for number in range(args.rounds):
        for prompts in args.prompts:
            kinds = list(folders)
            for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                found[str(prompts)][kind].append(measure(folders[kind], prompts))
                print(prompts, kind, round(found[str(prompts)][kind][-1], 1), flush=True)
    median = {n: {kind: statistics.median(runs) for kind, runs in of.items()} for n, of in found.items()}
    share = {n: {kind: round(one / of["int4"], 3) for kind, one in of.items()} for n, of in median.items()}
    result = {
        "machine": platform.processor() or platform.machine(),
        "group_size": GROUPS,
        "input_tokens": INPUT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "output_tokens_per_s": found,
        "median": median,
        "median_of_int4": share,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
