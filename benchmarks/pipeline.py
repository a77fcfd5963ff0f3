"""Pipeline parallelism with several steps in flight against one step at a time, on the cores of one machine.

    python benchmarks/pipeline.py [--rounds 3]

Two stages of one thread each serve a random checkpoint (`--pp 2`) with dense feed-forwards or with experts, with
`--pp-microbatches 1`, where a stage waits while the other computes, and with 2. One rank with two threads, which also
uses both cores, is the comparison without stages. The configurations alternate in each round, and the medians of the
rounds are reported, with the load of the machine at the end of each run. Decode speed counts the tokens after all
streams have their first token; the CPU time of all ranks for a token, which depends less on other load, is reported
beside it. Prefill speed counts prompt tokens until the last prompt has its first token; the
prompts arrive at once, or one after the other.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from core_requests import greedy_request
from on_checkpoint import command_and_date, make_rounds_parser, save_random_model, write_report
from process_cpu import cpu_seconds

from moiety_engine.config import EngineConfig
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop
from moiety_kernels.environment import describe_environment

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"intermediate_size": 1536},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True},
}
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "bfloat16",
    "max_batch_tokens": 1024,
    "max_running": 128,
    "kv_memory_bytes": 512 << 20,
    "prefix_caching": False,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "one step at a time": {"pp": 2, "pp_microbatches": 1, "num_threads": 1},
    "two steps in flight": {"pp": 2, "pp_microbatches": 2, "num_threads": 1},
    "one rank": {"num_threads": 2},
}
STREAMS, DECODE_PROMPT, OUTPUT_TOKENS = (8, 32), 32, 32
NUM_PROMPTS, PROMPT_TOKENS = 4, 512


def main() -> None:
    options = make_rounds_parser(__doc__, "pipeline.json").parse_args()
    report: dict[str, Any] = {
        **command_and_date(),
        "environment": describe_environment("numpy", "torch"),
        "settings": {
            "checkpoints": {name: SHAPE | more for name, more in FAMILIES.items()},
            "engine": SETTINGS,
            "configurations": CONFIGURATIONS,
            "decode": {"streams": STREAMS, "prompt_tokens": DECODE_PROMPT, "output_tokens": OUTPUT_TOKENS},
            "prefill": {"prompts": NUM_PROMPTS, "tokens": PROMPT_TOKENS},
        },
        "families": {},
    }
    runs: dict[str, dict[str, list[dict[str, float]]]] = {
        family: {name: [] for name in CONFIGURATIONS} for family in FAMILIES
    }
    with tempfile.TemporaryDirectory() as work:
        folders = {
            family: save_random_model(Path(work) / family, family, SHAPE | more) for family, more in FAMILIES.items()
        }
        for done in range(1, options.rounds + 1):
            for family, folder in folders.items():
                for name, layout in CONFIGURATIONS.items():
                    config = EngineConfig(model=str(folder), name="random", **SETTINGS, **layout)
                    with load_loop(config) as loop:
                        runs[family][name].append(measure(loop) | {"load_average": round(os.getloadavg()[0], 1)})
                    print(family, name, json.dumps(runs[family][name][-1]), file=sys.stderr)
            report["settings"]["rounds"] = done
            report["families"] = {family: summary_of(figures) for family, figures in runs.items()}
            write_report(report, options.output)


def summary_of(figures: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the medians of the rounds, the medians of the ratios of on to off in the same round, and the rounds."""
    medians = {
        name: {figure: round(statistics.median(one[figure] for one in rounds), 1) for figure in rounds[0]}
        for name, rounds in figures.items()
    }
    pairs = list(zip(figures["two steps in flight"], figures["one step at a time"], strict=True))
    speeds = [figure for figure in pairs[0][0] if figure != "load_average"]
    ratios = {figure: round(statistics.median(on[figure] / off[figure] for on, off in pairs), 3) for figure in speeds}
    return {"medians": medians, "ratio_on_to_off": ratios, "rounds": figures}


def measure(loop: EngineLoop) -> dict[str, float]:
    """Return tokens per second and CPU time of decoding, by number of streams, and of prefill."""
    loop.warm_up()
    decode_speed(loop, 8, 8)
    found = {}
    for count in STREAMS:
        begin_cpu_s = cpu_seconds()
        found[f"decode_{count}_streams_tokens_per_s"] = decode_speed(loop, count, OUTPUT_TOKENS)
        spent_s = cpu_seconds() - begin_cpu_s
        found[f"decode_{count}_streams_cpu_ms_per_token"] = 1e3 * spent_s / (count * OUTPUT_TOKENS)
    found["prefill_tokens_per_s"] = prefill_speed(loop, together=True)
    found["prefill_one_prompt_at_a_time_tokens_per_s"] = prefill_speed(loop, together=False)
    return found


def decode_speed(loop: EngineLoop, num_streams: int, num_tokens: int) -> float:
    """Return the tokens per second of all streams together, from the last first token on."""
    submits = [request(key, DECODE_PROMPT, num_tokens) for key in range(num_streams)]
    times = [result.token_times_s for result in run_all(loop, submits).values()]
    begin_s = max(one[0] for one in times)
    return sum(time_s > begin_s for one in times for time_s in one) / (max(one[-1] for one in times) - begin_s)


def prefill_speed(loop: EngineLoop, *, together: bool) -> float:
    """Return the prompt tokens per second."""
    num_prompts = NUM_PROMPTS if together else NUM_PROMPTS // 2
    submits = [request(key, PROMPT_TOKENS, 1) for key in range(num_prompts)]
    begin_s = time.perf_counter()
    for part in [submits] if together else [[one] for one in submits]:
        run_all(loop, part)
    return num_prompts * PROMPT_TOKENS / (time.perf_counter() - begin_s)


def request(key: int, num_prompt: int, num_tokens: int) -> CoreSubmit:
    return greedy_request(key, num_prompt, num_tokens, SHAPE["vocab_size"])


if __name__ == "__main__":
    main()
