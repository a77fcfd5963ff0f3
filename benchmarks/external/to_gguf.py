"""llama.cpp's own converter on a checkpoint whose tokenizer it does not know. Runs with torch and transformers.

    python to_gguf.py LLAMA_CPP_SOURCE CHECKPOINT FILE.gguf

The converter knows tokenizers by a hash of what they make of a text, and refuses all others. Which of its rules for
splitting words stands in the file does not matter to a gateway that sends token ids: GPT-2's does.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path


def main() -> None:
    source, checkpoint, file = sys.argv[1:]
    sys.path[:0] = [source, f"{source}/gguf-py"]
    from conversion import TextModel

    TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    family = json.loads((Path(checkpoint) / "config.json").read_text())["model_type"]
    more = ["--no-mtp"] if family == "qwen3_next" else []  # else the converter asserts that there is an MTP layer
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", file, "--outtype", "bf16", *more]
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main()
