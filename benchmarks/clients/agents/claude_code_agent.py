"""Claude Code in print mode: a tool loop with its own shell tool, reasoning, its stream of events."""

from __future__ import annotations

import json
import subprocess

import tasks
from commands import run_agent
from tasks import CITY_SCHEMA, Server, expect


def ask(server: Server, prompt: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_MODEL": server.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return run_agent(["claude", "-p", prompt, *arguments], settings)


def tools(server: Server) -> None:
    made = ask(server, "Run echo moiety", "--allowedTools", "Bash")
    expect(made.stdout.strip() == "The tool says: moiety", made)


def stream(server: Server) -> None:
    made = ask(
        server, "Run echo moiety", "--allowedTools", "Bash", "--output-format", "stream-json", "--verbose",
        "--include-partial-messages",
    )  # fmt: skip
    kinds = [json.loads(line)["type"] for line in made.stdout.splitlines()]
    expect("stream_event" in kinds and kinds[-1] == "result", (kinds, made.stderr))


def chat(server: Server) -> None:
    made = ask(server, "Say hello", "--tools", "")
    expect(made.returncode == 0 and "42" in made.stdout, made)


def thoughts(server: Server) -> None:
    made = ask(server, "Say hello", "--tools", "", "--output-format", "stream-json", "--verbose", "--effort", "max")
    expect('"type":"thinking"' in made.stdout, made)


def structured_output(server: Server) -> None:
    made = ask(server, "Say a city", "--tools", "", "--output-format", "json", "--json-schema", json.dumps(CITY_SCHEMA))
    expect(json.loads(made.stdout).get("structured_output") == {"city": "Basel"}, made)


if __name__ == "__main__":
    tasks.main(
        {"chat": chat, "stream": stream, "tools": tools, "thoughts": thoughts, "structured output": structured_output}
    )
