"""Another side of `cpu_rivals.py`: the same work through transformers' `generate`, in the environment of Moiety.

    python transformers_offline.py CHECKPOINT THREADS INPUT_TOKENS OUTPUT_TOKENS COUNT [COUNT …]

Prints one JSON object: seconds to ready from the process's start, and for each count of simultaneous requests the
output tokens/s. All requests of a count are one batch of prompts of equal length.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

STARTED_S = time.time()


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint, threads, input_tokens, output_tokens, *counts = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    ready_s = time.time() - STARTED_S
    random = torch.Generator().manual_seed(0)

    def run(count: int) -> float:
        prompts_BT = torch.randint(100, model.config.vocab_size, (count, int(input_tokens)), generator=random)
        begin_s = time.perf_counter()
        length = int(output_tokens)
        with torch.inference_mode():
            out_BT = model.generate(
                prompts_BT,
                attention_mask=torch.ones_like(prompts_BT),
                do_sample=False,
                max_new_tokens=length,
                min_new_tokens=length,
            )
        wall_s = time.perf_counter() - begin_s
        assert out_BT.shape[1] == int(input_tokens) + length
        return count * length / wall_s

    run(1)  # warm
    rates = {count: run(int(count)) for count in counts}
    print(json.dumps({"version": version("transformers"), "ready_s": ready_s, "output_tokens_per_s": rates}))


if __name__ == "__main__":
    main()
