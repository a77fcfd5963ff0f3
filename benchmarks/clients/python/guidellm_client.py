"""guidellm: one short benchmark of streamed chats by its command."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import tasks
from tasks import LONG_TEXT, QUESTION, Server, expect


def benchmark(server: Server, request_format: str, text: str = QUESTION) -> None:
    data = Path("prompts.jsonl")
    data.write_text("".join(json.dumps({"prompt": f"{number}. {text}"}) + "\n" for number in range(4)))
    command = Path(os.environ["MOIETY_CLIENT_COMMANDS"]) / "guidellm"
    backend = f"kind=openai_http,target={server.url},model={server.model},api_key={server.key}"
    made = subprocess.run(
        [
            *(str(command), "run", "--backend", f"{backend},request_format={request_format}"),
            *("--data", f"kind=json_file,path={data}", "--profile", "kind=synchronous"),
            *("--constraint", "kind=max_requests,count=3", "--output", "kind=json,path=report.json"),
            "--disable-console",
        ],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    errors = [line for line in (made.stdout + made.stderr).splitlines() if "Error" in line]
    expect(made.returncode == 0, errors[-1:])
    (found,) = json.loads(Path("report.json").read_text())["benchmarks"]
    counts = found["metrics"]["request_totals"]
    expect(counts["successful"] == 3 and counts["errored"] == 0, counts)


def stream(server: Server) -> None:
    benchmark(server, "/v1/chat/completions")


def chat(server: Server) -> None:
    benchmark(server, "/v1/completions")


def long_prompt(server: Server) -> None:
    benchmark(server, "/v1/chat/completions", LONG_TEXT)


if __name__ == "__main__":
    only = "it measures texts only"
    absent = dict.fromkeys(("tools", "structured output", "thoughts", "images"), only)
    tasks.main(globals(), {**absent, "cancel": "it ends its requests itself"})
