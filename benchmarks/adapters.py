"""Cost of LoRA adapters: 64 adapters of 32 tenants in one batch against the same batch without adapters.

    python benchmarks/adapters.py [--checkpoint FOLDER] [--rounds 3] [--rank 4] [--clock wall] [--work FOLDER]

Both run interleaved in one process, on the demo model, or with --checkpoint on another, such as the random Qwen3-MoE of
benchmarks/checkpoint.py. The rate is tokens per second of CPU time, which other load on the machine changes least
(`--clock wall` uses wall time). Each answer in the batch must equal the answer that the same request gets alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from on_checkpoint import loaded_run

from moiety_engine.adapters.dummy import ATTENTION, write_adapter
from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import EngineConfig
from moiety_engine.environment import environment
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop
from moiety_wire.classes import BATCH
from moiety_wire.messages import Sampling

HERE = Path(__file__).parent
CLOCKS: dict[str, Callable[[], int]] = {"processor": time.process_time_ns, "wall": time.perf_counter_ns}
NUM_ADAPTERS, NUM_TENANTS = 64, 32
KV_BYTES = 1 << 29
NEEDED = 0.7  # of the throughput without adapters
VARIANTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "attention": ATTENTION,
    "attention_and_experts": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="checkpoint to use instead of the demo model")
    parser.add_argument("--work", type=Path, help="folder of the adapters; existing ones are used again")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--checked", type=int, default=4, help="number of answers that are also generated alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="processor")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "adapters.json")
    options = parser.parse_args()
    folder = options.checkpoint or resolve_checkpoint("")
    models = {folder.name if options.checkpoint else "moiety-demo": measure(folder, options)}
    report = {
        **loaded_run(options),
        "adapters": NUM_ADAPTERS,
        "tenants": NUM_TENANTS,
        "models": models,
        "verdict": {
            f"at_least_{NEEDED}": all(
                variant["ratio"] >= NEEDED for model in models.values() for variant in model["variants"].values()
            )
        },
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all variants on one model, in turn."""
    with tempfile.TemporaryDirectory() if options.work is None else contextlib.nullcontext(options.work) as work:
        plain = EngineConfig(
            model=str(folder),
            name=folder.name,
            num_threads=options.threads,
            kv_memory_bytes=KV_BYTES,
            prefix_caching=False,
        )
        loops = {name: make_loop(plain, name, modules, Path(work), options) for name, modules in VARIANTS.items()}
        speeds: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for loop in loops.values():
            run(loop, options)  # what is recorded and compiled is there then
        for number in range(options.rounds):
            order = list(VARIANTS) if number % 2 else list(reversed(VARIANTS))
            for name in order:
                speeds[name].append(run(loops[name], options)[0])
        bare = statistics.median(speeds["none"])
        return {
            "environment": environment(loops["none"]),
            "variants": {
                name: {
                    "tokens_per_s": speeds[name],
                    "ratio": round(statistics.median(speeds[name]) / bare, 4),
                    "alone_alike": check(loops[name], options),
                }
                for name in VARIANTS
            },
        }


def make_loop(
    plain: EngineConfig, name: str, modules: tuple[str, ...], work: Path, options: argparse.Namespace
) -> EngineLoop:
    """Create a loop with a separate model, which has the adapter slots."""
    folders = {f"a{number}": work / name / f"a{number}" for number in range(NUM_ADAPTERS if modules else 0)}
    for number, folder in enumerate(folders.values()):
        if not folder.exists():
            write_adapter(folder, Path(plain.model), modules=modules, rank=options.rank, seed=number)
    given = {adapter: str(folder) for adapter, folder in folders.items()}
    config = msgspec.structs.replace(
        plain, adapters=given, max_adapters=NUM_ADAPTERS, adapter_memory_bytes=4 << 30, max_running=NUM_ADAPTERS
    )
    loop = load_loop(config)
    loop.warm_up()
    return loop


def run(loop: EngineLoop, options: argparse.Namespace, only: int | None = None) -> tuple[float, dict[int, list[int]]]:
    """Return the output tokens per second of one batch, and each answer; `only` runs one request alone."""
    wanted = range(NUM_ADAPTERS) if only is None else [only]
    submits = [make_submit(loop, number, options) for number in wanted]
    clock = CLOCKS[options.clock]
    begin = clock()
    found = run_all(loop, submits)
    seconds = (clock() - begin) / 1e9
    answers = {key - 1: one.token_ids for key, one in found.items()}
    return sum(map(len, answers.values())) / seconds, answers


def make_submit(loop: EngineLoop, number: int, options: argparse.Namespace) -> CoreSubmit:
    vocabulary = loop.executor.model.spec.vocab_size
    prompt = [(number * 31 + i * 7) % (vocabulary - 8) + 4 for i in range(options.prompt_tokens)]
    return CoreSubmit(
        key=number + 1,
        tenant_id=f"tenant-{number % NUM_TENANTS}",
        service=BATCH,
        prompt_ids=prompt,
        sampling=Sampling(temperature=0.0),
        max_tokens=options.output_tokens,
        min_tokens=options.output_tokens,
        stop_token_ids=[],
        credit_tokens=options.output_tokens,
        cache_salt=b"",
        arrival_unix_ns=time.time_ns(),
        adapter=f"a{number}" if loop.intake.adapters.slots else "",
    )


def check(loop: EngineLoop, options: argparse.Namespace) -> bool:
    """Return whether some answers of the batch equal those that are generated alone."""
    _, together = run(loop, options)
    some = range(0, NUM_ADAPTERS, max(1, NUM_ADAPTERS // max(1, options.checked)))
    return all(run(loop, options, only=number)[1][number] == together[number] for number in some)


if __name__ == "__main__":
    main()
