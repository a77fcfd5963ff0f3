"""Context parallelism of decode and of prefill against tensor parallelism alone, on the cores of one machine.

    python benchmarks/context_parallel.py [--rounds 3]

Each rank has the same memory for its KV cache. A random checkpoint with latent attention, whose rows every rank of
`--tp` holds, is served by one rank with two threads, by two ranks with one thread each (`--tp 2`), by the same two
ranks that divide the positions of each sequence (`--decode-context-parallel 2`), and by two ranks with copies of the
cache that divide the tokens of each step (`--prefill-context-parallel 2`). The longest context follows from the memory.
A prompt longer than the cache of one rank is sent to each configuration, and its answer or refusal is reported. Speeds
are those of requests that fit everywhere. The configurations alternate in each round, and the medians of the rounds are
reported, with the load of the machine at the end of each run. Decode speed counts the tokens after all streams have
their first token. The CPU time of all ranks together for a token of each group of requests, and the ratios of all
figures to those of `--tp 2` in the same round, depend less on other load than the speeds.
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
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 32768,
}
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_batch_tokens": 256,
    "max_running": 16,
    "kv_memory_bytes": 4 << 20,
    "host_kv_memory_bytes": 0,
    "prefix_caching": False,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "one rank": {"num_threads": 2},
    "tp 2": {"tp": 2, "num_threads": 1},
    "tp 2, decode context parallel 2": {"tp": 2, "decode_context_parallel": 2, "num_threads": 1},
    "prefill context parallel 2": {"prefill_context_parallel": 2, "ep": 2, "num_threads": 1},
}
BASE = "tp 2"
LONG_PROMPT, OUTPUT_TOKENS = 1500, 24
STREAMS = ((1, 700), (4, 200))  # numbers of streams that decode at once, and the tokens of their prompts


def main() -> None:
    options = make_rounds_parser(__doc__, "context_parallel.json").parse_args()
    report: dict[str, Any] = {
        **command_and_date(),
        "environment": describe_environment("numpy", "torch"),
        "settings": {
            "checkpoint": {"family": "deepseek_v3"} | SHAPE,
            "engine": SETTINGS,
            "configurations": CONFIGURATIONS,
            "long_prompt_tokens": LONG_PROMPT,
            "streams": STREAMS,
            "output_tokens": OUTPUT_TOKENS,
        },
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONFIGURATIONS}
    with tempfile.TemporaryDirectory() as work:
        folder = save_random_model(Path(work) / "checkpoint", "deepseek_v3", SHAPE)
        for done in range(1, options.rounds + 1):
            for name, layout in CONFIGURATIONS.items():
                config = EngineConfig(model=str(folder), name="random", **SETTINGS, **layout)
                with load_loop(config) as loop:
                    runs[name].append(measure(loop) | {"load_average": round(os.getloadavg()[0], 1)})
                print(name, json.dumps(runs[name][-1]), file=sys.stderr)
            report["settings"]["rounds"] = done
            report["configurations"] = {name: summary_of(rounds, runs[BASE]) for name, rounds in runs.items()}
            write_report(report, options.output)


def summary_of(rounds: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that are the same in all rounds, the medians of the others, and the rounds.

    The ratios are the medians of those to the base in the same round.
    """
    medians = {
        figure: round(statistics.median(one[figure] for one in rounds), 1)
        for figure, value in rounds[0].items()
        if isinstance(value, float)
    }
    fixed = {figure: value for figure, value in rounds[0].items() if not isinstance(value, float)}
    ratios = {
        figure: round(
            statistics.median(own[figure] / other[figure] for own, other in zip(rounds, base, strict=True)), 3
        )
        for figure in medians
        if figure in base[0] and figure != "load_average"
    }
    return fixed | {"medians": medians, f"ratios_to_{BASE}": ratios, "rounds": rounds}


def measure(loop: EngineLoop) -> dict[str, Any]:
    """Return the longest context, the fate of the long prompt, and the speeds of prefill and decode."""
    loop.warm_up()
    run_all(loop, [request(0, 64, 8)])
    found: dict[str, Any] = {"longest_context_tokens": loop.max_context_tokens, "long_prompt": "served"}
    begin_s = time.perf_counter()
    if loop.max_context_tokens > LONG_PROMPT:
        run_all(loop, [request(1, LONG_PROMPT, 1)])
        found["long_prompt_tokens_per_s"] = LONG_PROMPT / (time.perf_counter() - begin_s)
    else:
        found["long_prompt"] = refusal_of(loop, request(1, LONG_PROMPT, 1))
    for count, num_prompt in STREAMS:
        name = f"{count}_streams_of_{num_prompt}_tokens"
        begin_s, begin_cpu_s = time.perf_counter(), cpu_seconds()
        times = [
            result.token_times_s
            for result in run_all(loop, [request(key, num_prompt, OUTPUT_TOKENS) for key in range(count)]).values()
        ]
        spent_s = cpu_seconds() - begin_cpu_s
        found[f"cpu_ms_per_token_{name}"] = 1e3 * spent_s / (count * (num_prompt + OUTPUT_TOKENS))
        first_s = max(one[0] for one in times)
        found[f"prefill_{name}_tokens_per_s"] = count * num_prompt / (first_s - begin_s)
        decoded = sum(time_s > first_s for one in times for time_s in one)
        found[f"decode_{name}_tokens_per_s"] = decoded / (max(one[-1] for one in times) - first_s)
    return found


def refusal_of(loop: EngineLoop, submit: CoreSubmit) -> str:
    """Return the message with which the engine refuses a request."""
    loop.submit(submit)
    while (step := loop.take_outputs()) is None or not step.failures:
        loop.step()
    return step.failures[0].message


def request(key: int, num_prompt: int, num_tokens: int) -> CoreSubmit:
    return greedy_request(key, num_prompt, num_tokens, SHAPE["vocab_size"])


if __name__ == "__main__":
    main()
