"""Expert parallelism between ranks with different tokens: row counts against capacities, and two-batch overlap.

    python benchmarks/expert_parallel.py [--waves 6]

An engine with `--dp-attention 2 --ep 2` runs over gloo on one host, on a random checkpoint in the shape of Qwen3-MoE
(32 experts, 4 per token, 4 layers) in float32. Each variant of `--expert-all2all` and `--two-batch-overlap` serves the
same greedy requests. Variants take turns, wave by wave, so that other load of the machine meets all alike. The report
has tokens/s, the median over waves, and whether the tokens equal those of one rank up to near-equal logits.

Collectives and waits of the host for the device are counted on rank 0 over its passes, not timed: each call of
torch.distributed, and each operation on tensors whose result the host needs (tolist, item, nonzero, cpu), which on a
GPU waits for all queued work. `in_layers` are those in MoE layers, per layer and pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import torch.distributed as dist
from rebalancing import make_checkpoint, settings_of
from torch.overrides import TorchFunctionMode

from moiety_engine.distribution.expert_all_to_all import PaddedAllToAll
from moiety_engine.logs import configure_logs
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.model import dispatch
from moiety_engine.model.transformer import Transformer
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop
from moiety_kernels.environment import describe_environment
from moiety_wire.classes import BATCH
from moiety_wire.engine_choices import ExpertAll2All, TwoBatchOverlap
from moiety_wire.messages import Sampling

FAMILY, NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, NEAR = "qwen3_moe", 32, 48, 16, 1e-4
ONE_RANK = "one rank"
GROUPS = {"dp_attention": 2, "ep": 2}
SETTINGS: dict[str, Any] = {
    "max_batch_tokens": 512, "max_running": 32, "kv_memory_bytes": 32 << 20, "prefix_caching": False, "num_threads": 1,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    ONE_RANK: {},
    "exact counts": GROUPS | {"expert_all2all": ExpertAll2All.TORCH, "two_batch_overlap": TwoBatchOverlap.OFF},
    "exact counts, two batches": GROUPS
    | {"expert_all2all": ExpertAll2All.TORCH, "two_batch_overlap": TwoBatchOverlap.ON},
    "capacities": GROUPS | {"expert_all2all": ExpertAll2All.TORCH_PADDED, "two_batch_overlap": TwoBatchOverlap.OFF},
    "capacities, two batches": GROUPS
    | {"expert_all2all": ExpertAll2All.TORCH_PADDED, "two_batch_overlap": TwoBatchOverlap.ON},
}
COLLECTIVES = ("all_to_all_single", "all_gather", "all_reduce", "broadcast", "send", "recv")
WAITS = ("tolist", "item", "nonzero", "cpu", "__bool__", "__int__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waves", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "expert_parallel.json")
    parser.add_argument("--serve", nargs=2, metavar=("NAME", "FOLDER"), help="run one variant; for this script only")
    options = parser.parse_args()
    if options.serve:
        serve_lines(*options.serve)
        return
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        folder = make_checkpoint(Path(work) / FAMILY, FAMILY)
        engines = {name: stack.enter_context(Variant(name, folder)) for name in VARIANTS}
        served = {name: engine.ask("0") for name, engine in engines.items()}
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for wave in range(1, options.waves + 1):
            for name, engine in engines.items():
                rates[name].append(engine.ask(str(wave))["tokens_per_s"])
        counted = {name: engine.ask("count") for name, engine in engines.items() if name != ONE_RANK}
    report = {
        "date": date.today().isoformat(),
        "command": "python benchmarks/expert_parallel.py",
        "settings": {
            "waves": options.waves,
            "requests": NUM_REQUESTS,
            "prompt": PROMPT_TOKENS,
            "output": OUTPUT_TOKENS,
        },
        "environment": describe_environment("numpy", "torch"),
        "variants": [
            {
                "name": name,
                "settings": VARIANTS[name],
                "tokens_per_s": round(statistics.median(rates[name]), 1),
                "tokens_per_s_by_wave": [round(one, 1) for one in rates[name]],
                "tokens": compare(served[ONE_RANK]["tokens"], served[name]["tokens"]),
            }
            | counted.get(name, {})
            for name in VARIANTS
        ],
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    sys.stderr.write(json.dumps(report["variants"], indent=1) + "\n")


class Variant:
    """Process with the engine of one variant: a process is in one group of ranks."""

    def __init__(self, name: str, folder: Path) -> None:
        command = [sys.executable, __file__, "--serve", name, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def ask(self, line: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def serve_lines(name: str, folder: str) -> None:
    """Answer each line of the input, a wave or `count`, with a line of JSON."""
    out, sys.stdout = sys.stdout, sys.stderr  # logs
    configure_logs()
    with load_loop(settings_of(Path(folder), **SETTINGS, **VARIANTS[name])) as loop:
        loop.warm_up()
        for line in sys.stdin:
            found = counted_pass(loop) if line.strip() == "count" else serve(loop, int(line))
            exchange = loop.executor.model._layers.all_to_all
            if isinstance(exchange, PaddedAllToAll):
                found["repeated_passes"] = exchange.repeats_total
            out.write(json.dumps(found) + "\n")
            out.flush()


def requests(wave: int) -> list[CoreSubmit]:
    def one(key: int) -> CoreSubmit:
        prompt = [5 + (key * 31 + i * 13 + wave * 7) % 500 for i in range(PROMPT_TOKENS)]
        sampling = Sampling(temperature=0.0, num_logprobs=2)
        return CoreSubmit(key, "t", BATCH, prompt, sampling, OUTPUT_TOKENS, 0, [], OUTPUT_TOKENS, b"s", 0)

    return [one(key) for key in range(NUM_REQUESTS)]


def serve(loop: EngineLoop, wave: int) -> dict[str, Any]:
    """Serve one wave; return prompt and output tokens per second, and the tokens with the gap of the best logits."""
    begin_s = time.perf_counter()
    found = run_all(loop, requests(wave))
    seconds = time.perf_counter() - begin_s
    tokens = {
        str(key): [
            (token, one.top_logprobs[0] - one.top_logprobs[1])
            for token, one in zip(result.token_ids, result.logprobs, strict=True)
            if one is not None
        ]
        for key, result in found.items()
    }
    return {"tokens_per_s": NUM_REQUESTS * (PROMPT_TOKENS + OUTPUT_TOKENS) / seconds, "tokens": tokens}


def compare(expected: dict[str, list[Any]], found: dict[str, list[Any]]) -> dict[str, int]:
    """Compare token by token up to the first difference; it is near where the two best logits nearly were equal."""
    counts = {"compared": 0, "near": 0, "other": 0}
    for key, wanted in expected.items():
        for (token, gap), (ours, _) in zip(wanted, found[key], strict=True):
            counts["compared"] += 1
            if token != ours:
                counts["near" if gap < NEAR else "other"] += 1
                break
    return counts


class HostWaits(TorchFunctionMode):
    """Count operations whose result the host needs, while `is_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.is_on = 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.is_on and getattr(func, "__name__", "") in WAITS
        return func(*args, **(kwargs or {}))


def counted_pass(loop: EngineLoop) -> dict[str, Any]:
    """Serve one wave and return collectives and host waits per pass, in all and in MoE layers."""
    calls, layer_calls, layers, passes = Counter[str](), Counter[str](), 0, 0
    waits, in_layer, layer_waits, pass_waits = HostWaits(), False, 0, 0

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            calls[name] += 1
            layer_calls[name] += in_layer
            return original(*args, **given)

        return call

    def inside(original: Callable[..., Any], *, begins: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            nonlocal in_layer, layer_waits, layers
            layers += begins
            before, in_layer = waits.count, True
            try:
                return original(*args, **given)
            finally:
                layer_waits, in_layer = layer_waits + waits.count - before, False

        return call

    def one_pass(model: Transformer, *args: Any, **given: Any) -> Any:
        nonlocal passes, pass_waits
        passes += 1
        before, waits.is_on = waits.count, True
        try:
            return run_layers(model, *args, **given)
        finally:
            waits.is_on, pass_waits = False, pass_waits + waits.count - before

    run_layers, begun = Transformer.run_layers, dispatch.BegunDispatch
    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(patch.object(dist, name, counting(name, getattr(dist, name))))
        stack.enter_context(patch.object(dispatch.Dispatch, "begin", inside(dispatch.Dispatch.begin, begins=True)))
        stack.enter_context(patch.object(begun, "run_experts", inside(begun.run_experts)))
        stack.enter_context(patch.object(begun, "add_to", inside(begun.add_to)))
        stack.enter_context(patch.object(Transformer, "run_layers", one_pass))
        stack.enter_context(waits)
        run_all(loop, requests(99))
    return {
        "passes": passes,
        "dispatches_per_pass": round(layers / passes, 2),
        "in_layers": {
            "collectives_per_dispatch": round(sum(layer_calls.values()) / layers, 2),
            "host_waits_per_dispatch": round(layer_waits / layers, 2),
        },
        "host_waits_per_pass": round(pass_waits / passes, 2),
        "collectives_per_pass": round(sum(calls.values()) / passes, 2),
    }


if __name__ == "__main__":
    main()
