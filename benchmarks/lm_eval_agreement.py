"""Scores of lm_eval through our API and through transformers: two tasks of the demo model, the same checkpoint.

lm_eval runs from a separate environment, which also has torch and transformers:

    python -m venv .lm_eval && .lm_eval/bin/pip install 'lm_eval[api,hf]'
    python benchmarks/lm_eval_agreement.py --lm-eval .lm_eval/bin/lm_eval

`sums` generates answers to chats (exact match). `sums_choice` ranks given answers, without the chat template, by their
log-probabilities, which needs those of prompt tokens (`echo` with `logprobs`); a model that is trained only on chats
has a low score here, which does not matter for the comparison. Everything is float32, so that scores can agree to the
last sample. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from external.processes import MOIETY, process, wait

import moiety_demo
from moiety_kernels.environment import describe_environment
from moiety_platform.supervisor.ports import claim_port

RESULTS = Path(__file__).parent / "results" / "lm_eval_agreement.json"
MODEL = "moiety-demo"
METRICS = {"sums": "exact_match", "sums_choice": "acc"}
TASKS = tuple(METRICS)
Run = dict[str, Any]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "What is {{{{a}}}} {{{{sign}}}} {{{{b}}}}?"
{rest}metadata:
  version: 1
"""
GENERATED = """\
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 16
  temperature: 0
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
CHOSEN = """\
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: label
target_delimiter: " "
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lm-eval", type=Path, required=True, help="path of the lm_eval command in its separate environment"
    )
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_tasks(work, options.samples, options.seed)
        with ThreadPoolExecutor() as pool:
            truth = pool.submit(through_transformers, options.lm_eval, work)
            runs = through_our_api(options.lm_eval, work) | truth.result()
    pairs = {
        "sums": ("transformers", "local-completions", "local-chat-completions"),
        "sums_choice": ("transformers", "local-completions"),
    }
    report = {
        "environment": describe_environment() | {"lm_eval": runs["transformers"]["sums"]["lm_eval"]},
        "settings": {"samples": options.samples, "seed": options.seed, "dtype": "float32"},
        "tasks": {task: compare(task, {way: runs[way] for way in ways}) for task, ways in pairs.items()},
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report["tasks"], indent=2))
    if not all(found["same_score"] for found in report["tasks"].values()):
        raise SystemExit("the scores differ")


def write_tasks(work: Path, samples: int, seed: int) -> None:
    """Write sums and differences up to numbers that the demo model often gets wrong."""
    drawn = random.Random(seed)
    data = work / "sums.json"
    lines = []
    for _ in range(samples):
        a, b, sign = drawn.randrange(10_000), drawn.randrange(10_000), drawn.choice("+-")
        most = drawn.choice((10, 100, 1000, 10_000))
        a, b = max(a % most, b % most), min(a % most, b % most)
        answer = a + b if sign == "+" else a - b
        choices = [str(answer + off) for off in drawn.sample((0, 1, -1, 10, -10, 2), 6)]
        label = choices.index(str(answer))
        lines.append({"a": a, "b": b, "sign": sign, "answer": str(answer), "choices": choices, "label": label})
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for name, rest in (("sums", GENERATED), ("sums_choice", CHOSEN)):
        (work / f"{name}.yaml").write_text(TASK.format(name=name, data=data, rest=rest), encoding="utf-8")


def through_transformers(command: Path, work: Path) -> dict[str, dict[str, Any]]:
    checkpoint = moiety_demo.checkpoint_path()
    arguments = ["--model", "hf", "--model_args", f"pretrained={checkpoint},dtype=float32", "--device", "cpu"]
    return {"transformers": evaluate(command, work, "transformers", TASKS, [*arguments, "--batch_size", "1"])}


def through_our_api(command: Path, work: Path) -> dict[str, dict[str, Any]]:
    """Run both tasks through our API, on a new `moiety serve`."""
    port, log = claim_port("127.0.0.1", 0, "--port"), work / "serve.log"
    serve = [sys.executable, "-c", MOIETY, "serve", "--no-dashboard", "--no-traces", "--dtype", "float32"]
    runs = {}
    with process([*serve, "--data-dir", work / "data", "--port", port], log, {}) as running:
        url = f"http://127.0.0.1:{port}"
        wait(f"{url}/readyz", running, log)
        key = json.loads((work / "data" / "keys.json").read_text(encoding="utf-8"))["tenant_key"]
        for way, path, tasks in (
            ("local-completions", "completions", TASKS),
            ("local-chat-completions", "chat/completions", TASKS[:1]),
        ):
            given = f"model={MODEL},base_url={url}/v1/{path},num_concurrent=4,tokenizer_backend=huggingface"
            given += f",tokenizer={moiety_demo.checkpoint_path()}"
            arguments = ["--model", way, "--model_args", given]
            runs[way] = evaluate(command, work, way, tasks, arguments, OPENAI_API_KEY=key)
    return runs


def evaluate(command: Path, work: Path, way: str, tasks: Sequence[str], arguments: Sequence[str], **more: str) -> Run:
    """Return the score of each task, and the result of each of its samples."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | OFFLINE | more

    def run(task: str) -> tuple[str, Any]:
        into = work / way / task
        line = [command, "run", *arguments, "--tasks", task, "--include_path", work]
        line += ["--log_samples", "--output_path", into, *(["--apply_chat_template"] if task == "sums" else [])]
        done = subprocess.run(list(map(str, line)), env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{way} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        report = json.loads(next(into.rglob("results_*.json")).read_text(encoding="utf-8"))
        text = next(into.rglob(f"samples_{task}_*.jsonl")).read_text(encoding="utf-8")
        samples = sorted(map(json.loads, text.splitlines()), key=lambda sample: int(sample["doc_id"]))
        score = report["results"][task][f"{METRICS[task]},none"]
        return task, {"score": score, "samples": samples, "lm_eval": report.get("lm_eval_version")}

    with ThreadPoolExecutor() as pool:
        return dict(pool.map(run, tasks))


def compare(task: str, runs: dict[str, Run]) -> dict[str, Any]:
    """Return `samples_that_differ`: the samples whose score differs from that through transformers."""
    scores = {way: run[task]["score"] for way, run in runs.items()}
    truth = runs["transformers"][task]["samples"]
    found: dict[str, Any] = {"scores": scores, "same_score": len(set(scores.values())) == 1}
    found["samples_that_differ"] = {
        way: sum(
            one[METRICS[task]] != true[METRICS[task]] for one, true in zip(run[task]["samples"], truth, strict=True)
        )
        for way, run in runs.items()
    }
    if task == "sums_choice":
        found["largest_difference_of_a_logprob"] = {
            way: max(map(_furthest, run[task]["samples"], truth)) for way, run in runs.items()
        }
    return found


def _furthest(sample: dict[str, Any], truth: dict[str, Any]) -> float:
    pairs = zip(sample["filtered_resps"], truth["filtered_resps"], strict=True)
    return max(abs(float(ours[0]) - float(theirs[0])) for ours, theirs in pairs)


if __name__ == "__main__":
    main()
