"""Structured outputs: whether all answers are valid, and their cost per step.

    python benchmarks/structured.py [--schemas 1000] [--turns 9] [--only cost]

Documents of 1,000 generated schemas come from the demo model, which knows no JSON, and from the same network with
random weights. These models seldom end open parts (the length of a string, one more entry), so `logit_bias` makes
closing tokens likelier; the validity of a document does not depend on it. A document that `max_tokens` has cut is
counted separately. The cost is that of steps of 32 streams with a schema and without, in turns, on the checkpoint of
`checkpoint.py`.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema_rs
import llguidance
import torch
from on_checkpoint import find_or_make_checkpoint, make_parser, write_report
from schemas import SchemaMaker

from moiety_demo import checkpoint_path
from moiety_engine.config import EngineConfig, PolicyName
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop
from moiety_text.folder import read_text_model
from moiety_text.tokenizer import Tokenizer
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import LoadFormat
from moiety_wire.grammars import GrammarKind, GrammarSpec
from moiety_wire.messages import Sampling

MAX_TOKENS = 900
AT_ONCE = 64
CLOSING = '"}]'
NUM_STEPS = 40
PATIENCE_S = 600.0


class Text:
    """The demo model's tokenizer, and its tokens that close something."""

    def __init__(self, folder: Path) -> None:
        found = read_text_model(folder)
        self.tokenizer = Tokenizer.from_json(found.tokenizer_json)
        self.eos = list(found.eos_token_ids)
        spelled = {i: self.tokenizer.token_bytes(i) for i in range(self.tokenizer.vocab_size)}
        self.closing = {i: 12.0 for i, one in spelled.items() if one and all(chr(b) in CLOSING for b in one)}

    def request(self, key: int, grammar: GrammarSpec | None, *, max_tokens: int, min_tokens: int = 0) -> CoreSubmit:
        sampling = Sampling(temperature=1.0, seed=key, logit_bias=self.closing if min_tokens == 0 else {})
        prompt = self.tokenizer.encode(f"<|im_start|>user\nDescribe thing {key}.<|im_end|>\n<|im_start|>assistant\n")
        return CoreSubmit(
            key, "t", STANDARD, prompt, sampling, max_tokens, min_tokens, self.eos, max_tokens, b"", 0, grammar=grammar
        )


def check_documents(loop: EngineLoop, text: Text, schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of valid, cut and invalid documents, and the errors of the invalid ones."""
    counts: Counter[str] = Counter()
    wrong: list[dict[str, str]] = []
    num_tokens = 0
    begin_s = time.perf_counter()
    for first in range(0, len(schemas), AT_ONCE):
        batch = dict(enumerate(schemas[first : first + AT_ONCE], first + 1))
        grammars = {key: GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for key, schema in batch.items()}
        found = run_all(loop, [text.request(key, grammar, max_tokens=MAX_TOKENS) for key, grammar in grammars.items()])
        for key, result in found.items():
            num_tokens += len(result.token_ids)
            if result.finish is not None and result.finish.detail != "stop_token":
                counts["cut"] += 1
                continue
            document = text.tokenizer.decode(result.token_ids)
            complaint = complaint_about(document, batch[key])
            counts["invalid" if complaint else "valid"] += 1
            if complaint:
                wrong.append({"schema": json.dumps(batch[key]), "document": document, "complaint": complaint})
    seconds = time.perf_counter() - begin_s
    return {
        "schemas": len(schemas),
        **counts,
        "output_tokens": num_tokens,
        "seconds": round(seconds, 1),
        "wrong": wrong,
    }


def complaint_about(document: str, schema: dict[str, Any]) -> str:
    """Return "" if the document is JSON that satisfies the schema, formats included; else the error."""
    try:
        jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(document, parse_float=_float))
    except ValueError as exc:
        return str(exc).split("\n")[0]
    return ""


def _float(text: str) -> float:
    """Return a number as a double; too large ones become the largest, since JSON has no bound."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


COST_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "rows": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "number"}}}},
    },
    "required": ["name", "tags", "rows"],
    "additionalProperties": False,
}


def median_step_ms(
    loop: EngineLoop, text: Text, grammar: GrammarSpec | None, *, streams: int, first_key: int
) -> tuple[float, float]:
    """Return (wall time, CPU time) of the steps in which all streams decode."""
    for key in range(first_key, first_key + streams):
        loop.submit(text.request(key, grammar, max_tokens=NUM_STEPS, min_tokens=NUM_STEPS - 1))
    clock_ms, work_ms, until_s = [], [], time.monotonic() + PATIENCE_S
    while not loop.scheduler.idle or loop.waits_for_others:
        assert time.monotonic() < until_s, "the streams do not end"
        begin, work_begin = time.perf_counter(), time.process_time()
        loop.step()
        step = loop.take_outputs()
        if step is not None and len(step.outputs) == streams and all(out.token_ids for out in step.outputs):
            clock_ms.append((time.perf_counter() - begin) * 1000)
            work_ms.append((time.process_time() - work_begin) * 1000)
    return statistics.median(clock_ms[2:]), statistics.median(work_ms[2:])


def measure_cost(loop: EngineLoop, text: Text, *, streams: int, turns: int) -> dict[str, Any]:
    """Measure steps with and without a grammar, in turn.

    On a machine with other load, use the CPU time: it includes the mask threads.
    """
    grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(COST_SCHEMA))
    pairs: list[dict[bool, tuple[float, float]]] = []
    for turn in range(turns + 1):  # the first warms both up
        pair = {}
        for constrained in (turn % 2 == 0, turn % 2 == 1):
            key = 100_000 + turn * 1000 + constrained * 500
            pair[constrained] = median_step_ms(
                loop, text, grammar if constrained else None, streams=streams, first_key=key
            )
        pairs.append(pair)
    found: dict[str, Any] = {"streams": streams, "turns": turns}
    for place, name in enumerate(("by_the_clock", "of_processors_time")):
        ratios = sorted(pair[True][place] / pair[False][place] - 1 for pair in pairs[1:])
        found[name] = {
            "step_ms_with": round(statistics.median(pair[True][place] for pair in pairs[1:]), 2),
            "step_ms_without": round(statistics.median(pair[False][place] for pair in pairs[1:]), 2),
            "overhead_fraction": round(statistics.median(ratios), 4),
            "overhead_fraction_least_most": [round(ratios[0], 4), round(ratios[-1], 4)],
        }
    return found


def main() -> None:
    parser = make_parser(__doc__, "structured.json")
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument(
        "--only", choices=("documents", "cost"), help="measure only this part and keep the other results"
    )
    options = parser.parse_args()
    report: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    report |= {
        "date": date.today().isoformat(),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "llguidance": llguidance.__version__,
            "machine": platform.processor() or platform.machine(),
            "threads": options.threads,
        },
    }
    if options.only != "cost":
        report["documents"] = documents(options.schemas, options.seed, options.threads)
    if options.only != "documents":
        large = find_or_make_checkpoint(options.work)
        settings = {"device": "cpu", "dtype": "bfloat16", "num_threads": options.threads, "policy": PolicyName.FCFS}
        loop = load_loop(EngineConfig(model=str(large), name="m", **settings))
        report["cost"] = measure_cost(loop, Text(large), streams=options.streams, turns=options.turns)
        print(report["cost"])
    write_report(report, options.output)


def documents(num_schemas: int, seed: int, num_threads: int) -> dict[str, Any]:
    """Return the documents of both models."""
    maker = SchemaMaker(seed)
    schemas = [maker.make() for _ in range(num_schemas)]
    folder, found = checkpoint_path(), {}
    for name, source in (("demo model", LoadFormat.AUTO), ("random weights", LoadFormat.DUMMY)):
        config = EngineConfig(model=str(folder), name="m", device="cpu", load_format=source, num_threads=num_threads)
        found[name] = check_documents(load_loop(config), Text(folder), schemas)
        print(name, {key: value for key, value in found[name].items() if key != "wrong"}, flush=True)
    return found


if __name__ == "__main__":
    main()
