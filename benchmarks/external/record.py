"""Recording of llama.cpp's server for the tests.

It answers the heartbeat's queries and requests in the gateway's wording, on the demo model; a line of JSON each, the
heartbeat's first. The expected result of each request is the server's own answer without streaming.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
import msgspec

import moiety_demo
from external import llama_cpp
from moiety_platform.engine_addresses import ExternalAddress
from moiety_platform.external_engines.llama_cpp import LlamaCpp
from moiety_text.folder import read_text_model
from moiety_text.tokenizer import Tokenizer
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling, Stopping, Submit

CONTEXT_TOKENS = 512
ASKED_OF = ("/health", "/v1/models", "/props", "/slots", "/metrics")
FRANCE = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
GREEDY = Sampling(temperature=0.0)


def record(work: Path, output: Path) -> None:
    checkpoint = moiety_demo.checkpoint_path()
    tokenizer = Tokenizer.from_json(read_text_model(checkpoint).tokenizer_json)
    prompt_ids = tokenizer.encode(FRANCE)
    beginning = tokenizer.encode("\N{SLIGHTLY SMILING FACE}")[0]  # of a character of four bytes
    cases = {
        "ended by its end-of-sequence token": (prompt_ids, GREEDY, Stopping(30)),
        "ended by a stop string": (prompt_ids, GREEDY, Stopping(30, stop=("is",))),
        "ended by the limit while it looks like a stop string": (prompt_ids, GREEDY, Stopping(3, stop=("ixed",))),
        "ended by the limit in the middle of a character": (
            prompt_ids,
            Sampling(temperature=0.0, logit_bias={beginning: 100.0}),
            Stopping(6),
        ),
        "every parameter": (
            prompt_ids,
            Sampling(
                temperature=0.7,
                top_p=0.9,
                top_k=40,
                min_p=0.05,
                seed=2**40,
                repetition_penalty=1.1,
                presence_penalty=0.5,
                frequency_penalty=0.25,
                logit_bias={5: -100.0},
            ),
            Stopping(12, stop=("\n",), ignore_eos=True),
        ),
        "a prompt that is too long": (prompt_ids * 40, GREEDY, Stopping(5)),
    }
    with tempfile.TemporaryDirectory(prefix="moiety-record-") as name:
        serving = llama_cpp.serve(work, checkpoint, Path(name), 2, CONTEXT_TOKENS)
        with serving as (server, version), httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
            dialect = LlamaCpp(ExternalAddress.parse(server.address))
            requests = [_ask(http, dialect, name, *case) for name, case in cases.items()]
            told = {path: http.get(path).raise_for_status().text for path in ASKED_OF}
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"server": version, "context_tokens": CONTEXT_TOKENS, "told": told}, *requests]
    output.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _ask(
    http: httpx.Client, dialect: LlamaCpp, name: str, prompt_ids: list[int], sampling: Sampling, stopping: Stopping
) -> dict[str, Any]:
    most = stopping.max_tokens
    submit = Submit("r", 0, "demo", "t", STANDARD, prompt_ids, sampling, stopping, most, b"", 0)
    body = dialect.body(submit, prompt_ids, most, 0)
    answer = http.post(dialect.path, json=body, headers={"Connection": "close"})
    whole = http.post(dialect.path, json={**body, "stream": False, "response_fields": []}).json()
    return {
        "name": name,
        "sampling": msgspec.to_builtins(sampling),
        "stopping": msgspec.to_builtins(stopping),
        "body": body,
        "status": answer.status_code,
        "type": answer.headers["content-type"],
        "answer": answer.text,
        "whole": {key: whole.get(key) for key in ("content", "tokens_predicted", "stop_type", "error")},
    }
