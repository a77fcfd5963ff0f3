"""Codex CLI in exec mode: a tool loop with its own shell tool, a document by schema, a conversation that goes on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import tasks
from commands import run_agent
from tasks import CITY_SCHEMA, Server, expect

CONFIG = """\
model = "{model}"
model_provider = "moiety"

[model_providers.moiety]
name = "Moiety"
base_url = "{url}"
env_key = "MOIETY_API_KEY"
wire_api = "responses"
"""


def ask(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    home = Path.cwd() / "codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(CONFIG.format(model=server.model, url=server.openai_url))
    settings = {"MOIETY_API_KEY": server.key, "CODEX_HOME": str(home)}
    return run_agent(["codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "--json", *arguments], settings)


def items_of(made: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    events = [json.loads(line) for line in made.stdout.splitlines()]
    expect(events and events[-1]["type"] == "turn.completed", made)
    return [event["item"] for event in events if event["type"] == "item.completed"]


def tools(server: Server) -> None:
    items = items_of(ask(server, "Run echo moiety"))
    expect("command_execution" in [item["type"] for item in items], items)
    expect("moiety" in str(items[-1].get("text")), items)


def stream(server: Server) -> None:
    tools(server)
    items = items_of(ask(server, "resume", "--last", "Run it again"))
    expect("The tool says" in str(items[-1].get("text")), items)


def structured_output(server: Server) -> None:
    file = Path("schema.json").absolute()
    file.write_text(json.dumps(CITY_SCHEMA))
    items = items_of(ask(server, "--output-schema", str(file), "Say a city"))
    expect(json.loads(str(items[-1].get("text"))) == {"city": "Basel"}, items)


def thoughts(server: Server) -> None:
    items = items_of(ask(server, "-c", "model_reasoning_effort=high", "Run echo moiety"))
    expect("reasoning" in [item["type"] for item in items], items)


if __name__ == "__main__":
    tasks.main({"stream": stream, "tools": tools, "structured output": structured_output, "thoughts": thoughts})
