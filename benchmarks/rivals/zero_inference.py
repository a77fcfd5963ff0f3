"""DeepSpeed's ZeRO-Inference on a CPU: transformers' model, whose offloaded weights are fetched layer by layer.

Prints one line of JSON. Needs deepspeed, transformers and accelerate; runs apart from the engine:

    PYTHON benchmarks/rivals/zero_inference.py CHECKPOINT [--tokens 16] [--store cpu|nvme]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}

import deepspeed
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--store", choices=["cpu", "nvme"], default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(options, folder)))


def run(options: argparse.Namespace, folder: str) -> dict[str, object]:
    where: dict[str, object] = {"device": options.store, "pin_memory": False}
    if options.store == "nvme":
        where |= {"nvme_path": folder, "buffer_count": 5, "buffer_size": 1 << 26}
    settings = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": where, "stage3_max_live_parameters": 1 << 24},
        "train_micro_batch_size_per_gpu": 1,
    }
    deepspeed.init_distributed("gloo")
    keep = HfDeepSpeedConfig(settings)  # while it lives, weights are divided as they are loaded
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.bfloat16)
    engine = deepspeed.initialize(model=model, config=settings)[0]
    engine.module.eval()
    ids = torch.arange(200, 200 + options.tokens)[None]
    times = []
    with torch.no_grad():
        for _ in range(2):  # the first is to warm up
            begin = time.perf_counter()
            engine.module.generate(ids, min_new_tokens=options.tokens, max_new_tokens=options.tokens, do_sample=False)
            times.append(time.perf_counter() - begin)
    del keep
    return {
        "deepspeed": deepspeed.__version__,
        "store": options.store,
        "tokens": options.tokens,
        "output_tokens_per_s": round(options.tokens / times[-1], 3),
        "load_average": os.getloadavg(),
    }


if __name__ == "__main__":
    main()
