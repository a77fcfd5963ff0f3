"""Generator of a checkpoint pair whose small model predicts the large model's output, like a good draft model.

    python benchmarks/draft_pair.py CHECKPOINT FOLDER [--layers 2] [--damping 0]

FOLDER/draft has the first layers of CHECKPOINT. FOLDER/target has all layers, but the output of the others is
multiplied by --damping, so that it changes the first layers' result only little; their cost stays the same. The nearer
--damping is to 0, the more often the draft is right; at 0 it is always right. FOLDER/draft is not a useful draft model
for CHECKPOINT itself if CHECKPOINT is random.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

LAYER = re.compile(r"model\.layers\.(\d+)\.")
ADDS = re.compile(r"(self_attn\.o_proj|down_proj)\.weight$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--damping", type=float, default=0.0)
    options = parser.parse_args()
    tensors = load_file(options.checkpoint / "model.safetensors")
    for name in ("draft", "target"):
        shutil.copytree(
            options.checkpoint,
            options.folder / name,
            ignore=shutil.ignore_patterns("*.safetensors"),
            dirs_exist_ok=True,
        )

    def layer(name: str) -> int:
        found = LAYER.match(name)
        return int(found[1]) if found else -1

    small = {name: tensor for name, tensor in tensors.items() if layer(name) < options.layers}
    save_file(small, options.folder / "draft" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((options.checkpoint / "config.json").read_text())
    (options.folder / "draft" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": options.layers}))
    for name, tensor in tensors.items():
        if layer(name) >= options.layers and ADDS.search(name):
            tensor.mul_(options.damping)
    save_file(tensors, options.folder / "target" / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
