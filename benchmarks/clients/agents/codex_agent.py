"""Codex CLI in exec mode: a tool loop with its own shell tool, a document by schema, a conversation that goes on."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import tasks
from cancellation import expect_cancelled
from commands import RefusedRequest, run_agent
from tasks import CITY_SCHEMA, LONG_TEXT, PIXEL, Server, expect

CONFIG = """\
model = "{model}"
model_provider = "moiety"

[model_providers.moiety]
name = "Moiety"
base_url = "{url}"
env_key = "MOIETY_API_KEY"
wire_api = "responses"
"""


COMMAND = ("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "--json")


def settings_of(server: Server) -> dict[str, str]:
    home = Path.cwd() / "codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(CONFIG.format(model=server.model, url=server.openai_url))
    return {"MOIETY_API_KEY": server.key, "CODEX_HOME": str(home)}


def ask(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_agent([*COMMAND, *arguments], settings_of(server))


def events_of(made: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in made.stdout.splitlines()]
    last = events[-1:] or made.stderr
    if "invalid_request_error" in str(last):
        raise RefusedRequest(events[-1]["error"]["message"])
    expect(events and events[-1]["type"] == "turn.completed", last)
    return events


def items_of(made: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [event["item"] for event in events_of(made) if event["type"] == "item.completed"]


def chat(server: Server) -> None:
    items = items_of(ask(server, "Say hello.\nUse no tools."))
    expect("command_execution" not in [item["type"] for item in items] and "42" in items[-1]["text"], items)


def long_prompt(server: Server) -> None:
    events = events_of(ask(server, f"{LONG_TEXT * 10}\nUse no tools."))
    expect(events[-1]["usage"]["input_tokens"] > 10 * tasks.MIN_LONG_TOKENS, events[-1])


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


def images(server: Server) -> None:
    file = Path("pixel.png").absolute()
    file.write_bytes(base64.b64decode(PIXEL))
    items = items_of(ask(server, "-i", str(file), "--", "What is it?"))
    expect(tasks.SEEN in items[-1]["text"], items)


def thoughts(server: Server) -> None:
    events = events_of(ask(server, "-c", "model_reasoning_effort=high", "Run echo moiety"))
    expect(events[-1]["usage"]["reasoning_output_tokens"] > 0, events[-1])


def cancel(server: Server) -> None:
    expect_cancelled(server, [*COMMAND, "Say hello"], settings_of(server))


if __name__ == "__main__":
    tasks.main(globals())
