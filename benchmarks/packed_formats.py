"""Throughput of AWQ and GPTQ checkpoints beside 4-bit weights as Moiety writes them, in `moiety bench engine`.

    python benchmarks/packed_formats.py MODEL FOLDER

MODEL is a checkpoint in 16 bits (`benchmarks/checkpoint.py`). The checkpoints that are written to FOLDER have its
weights rounded to 4 bits: AWQ with zero points and GPTQ symmetric, in groups of 128 inputs as they are published, GPTQ
also with act-order (`desc_act`), and `pack-quantized` in groups of 32 as `moiety quantize` writes it. All are loaded in
one process and run the requests of `moiety bench engine` in turn, in small rounds, with one thread. The verdict uses
the processor's time, which other processes of the machine change less than the wall's.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import time
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import torch
from on_checkpoint import loaded_run
from safetensors.torch import load_file, save_file
from torch import Tensor

from moiety_engine.bench.engine import make_request
from moiety_engine.bench.lengths import BenchLengths
from moiety_engine.config import EngineConfig
from moiety_engine.environment import environment
from moiety_engine.loop import EngineLoop
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop

BITS = 4
GROUPS = {"int4": 32, "awq": 128, "gptq": 128, "gptq_act_order": 128, "awq_32": 32}
MOST = 2**BITS - 1
INPUT_TOKENS = 32
KV_BYTES, SETTLING_S = 1 << 28, 20.0
T_975 = {3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36}
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
COMPARED = tuple(SETTINGS)
SETTINGS["awq_32"] = SETTINGS["awq"] | {"group_size": GROUPS["awq_32"]}  # for other benchmarks: stored as GGUF's Q4_K
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
    width, is_awq = weight_NK.shape[1], method.startswith("awq")
    order_K = order_of(module, width) if method == "gptq_act_order" else torch.arange(width)
    numbers, scales, zeros = rounded(weight_NK[:, order_K], GROUPS[method], symmetric=not is_awq)
    numbers = torch.empty_like(numbers).index_copy_(1, order_K, numbers)
    if method == "int4":
        shape = torch.tensor(weight_NK.shape)
        return {
            f"{module}.weight_packed": words(numbers),
            f"{module}.weight_scale": scales.bfloat16(),
            f"{module}.weight_shape": shape,
        }
    if is_awq:
        packed = [
            words(part.T.reshape(part.shape[1], -1, 8)[..., list(AWQ_ORDER)].flatten(-2)) for part in (numbers, zeros)
        ]
    else:
        packed = [words(numbers).T.contiguous(), words((zeros - 1).T.contiguous())]
    parts = {"qweight": packed[0], "qzeros": packed[1], "scales": scales.T.half().contiguous()}
    if not is_awq:
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


def open_loops(folders: dict[str, Path]) -> dict[str, EngineLoop]:
    """Load all formats as `moiety bench engine --dtype bfloat16` does, with one thread each, and warm them up."""
    loops = {}
    for kind, folder in folders.items():
        config = EngineConfig(
            model=str(folder),
            name=kind,
            dtype="bfloat16",
            num_threads=1,
            kv_memory_bytes=KV_BYTES,
            prefix_caching=False,
        )
        loop = loops[kind] = load_loop(config)
        loop.executor.settle_weights(SETTLING_S)  # its thread's time would count
        loop.warm_up()
    return loops


def measure(loop: EngineLoop, prompts: int, number: int, lengths: BenchLengths) -> dict[str, float]:
    """Return the output tokens per second of a run, by the processor's time and by the wall's."""
    rng = random.Random(number)
    submits = [make_request(loop, 1000 * number + key, lengths, rng) for key in range(prompts)]
    begins = time.process_time(), time.perf_counter()
    results = run_all(loop, submits)
    seconds = time.process_time() - begins[0], time.perf_counter() - begins[1]
    num_tokens = sum(len(result.token_ids) for result in results.values())
    assert num_tokens == prompts * lengths.output_tokens, "a request has ended early"
    return {"processor": num_tokens / seconds[0], "wall": num_tokens / seconds[1]}


def compared(runs: dict[str, list[dict[str, float]]], clock: str) -> dict[str, Any]:
    """Return the median tokens/s of each format, and its ratio to int4: the mean over rounds and its 95 % interval."""
    found = {}
    for kind, own in runs.items():
        ratios = [math.log(one[clock] / base[clock]) for one, base in zip(own, runs["int4"], strict=True)]
        mean = statistics.mean(ratios)
        margin = T_975[len(ratios)] * statistics.stdev(ratios) / math.sqrt(len(ratios))
        found[kind] = {
            "median_tokens_per_s": round(statistics.median(one[clock] for one in own), 2),
            "ratio_to_int4": round(math.exp(mean), 4),
            "interval": [round(math.exp(mean + side), 4) for side in (-margin, margin)],
        }
    return found


def main() -> None:
    """Write the checkpoints, run all formats in turn in small rounds, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=4, choices=sorted(T_975))
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "packed_formats.json")
    options = parser.parse_args()
    folders = {method: options.folder / method for method in COMPARED}
    torch.set_num_threads(1)
    for method, folder in folders.items():
        if not (folder / "model.safetensors").exists():
            write(method, options.model, folder)
    loops, lengths = open_loops(folders), BenchLengths(INPUT_TOKENS, options.output_tokens)
    runs = {prompts: {kind: list[dict[str, float]]() for kind in folders} for prompts in options.prompts}
    for prompts, kind in product(options.prompts, folders):  # all have then run what they will run
        measure(loops[kind], prompts, 0, BenchLengths(INPUT_TOKENS, 4))
    for number in range(1, options.rounds + 1):
        kinds = list(folders)
        turned = kinds[number % len(kinds) :] + kinds[: number % len(kinds)]
        for prompts, kind in product(options.prompts, turned):
            runs[prompts][kind].append(measure(loops[kind], prompts, number, lengths))
            print(
                number,
                prompts,
                kind,
                {name: round(one, 1) for name, one in runs[prompts][kind][-1].items()},
                flush=True,
            )
    figures = {
        f"{prompts} streams": {clock: compared(of_kinds, clock) for clock in ("processor", "wall")}
        for prompts, of_kinds in runs.items()
    }
    packed = [kind for kind in folders if kind != "int4"]
    result = {
        **loaded_run(options),
        "environment": environment(loops["int4"]),
        "group_size": GROUPS,
        "input_tokens": INPUT_TOKENS,
        "output_tokens": options.output_tokens,
        "figures": figures,
        "verdict": {
            f"{kind}_at_least_0.9": all(one["processor"][kind]["ratio_to_int4"] >= 0.9 for one in figures.values())
            for kind in packed
        },
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
