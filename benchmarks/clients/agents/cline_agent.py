"""Cline CLI with one prompt: a tool loop with its shell tool by chat completions, reasoning, its stream of events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tasks
from cancellation import expect_cancelled
from commands import run_agent
from tasks import LONG_TEXT, Server, expect

SETTINGS = {"CLINE_TELEMETRY_DISABLED": "1"}
SESSION_TIMEOUT_S = 100


def command_of(server: Server, *arguments: str) -> list[str]:
    """Return the command of a session, after it has registered the server."""
    place = ["--data-dir", str(Path.cwd() / "cline")]
    provider = ["-p", "openai", "-b", server.openai_url, "-k", server.key, "-m", server.model]
    made = run_agent(["cline", "auth", *provider, *place], SETTINGS)
    expect(made.returncode == 0, made)
    return ["cline", *place, "--json", "--timeout", str(SESSION_TIMEOUT_S), *arguments]


def events_of(server: Server, prompt: str, *arguments: str) -> list[dict[str, Any]]:
    """Return the events of a session. The last one has the answer."""
    made = run_agent(command_of(server, *arguments, prompt), SETTINGS)
    found = [json.loads(line) for line in made.stdout.splitlines() if line.startswith("{")]
    expect(found and found[-1].get("finishReason") == "completed", (made.stdout + made.stderr)[-600:])
    return found


def chat(server: Server) -> None:
    last = events_of(server, "Say hello.\nUse no tools.")[-1]
    expect("42" in last["text"] and last["usage"]["inputTokens"] > 0, last)


def stream(server: Server) -> None:
    events = [one["event"] for one in events_of(server, "Say hello.\nUse no tools.") if one["type"] == "agent_event"]
    parts = [one["text"] for one in events if one["type"] == "content_start" and one.get("contentType") == "text"]
    expect(len(parts) > 1 and "42" in "".join(parts), parts)


def tools(server: Server) -> None:
    last = events_of(server, "Run echo moiety")[-1]
    expect(last["iterations"] == 2 and "The tool says:" in last["text"] and '"success":true' in last["text"], last)


def thoughts(server: Server) -> None:
    events = events_of(server, "Say hello.\nUse no tools.", "--thinking", "high")
    expect("The tool knows it." in json.dumps(events), events[-1])


def long_prompt(server: Server) -> None:
    last = events_of(server, f"{LONG_TEXT * 10}\nUse no tools.")[-1]
    expect(last["usage"]["inputTokens"] > 10 * tasks.MIN_LONG_TOKENS, last)


def cancel(server: Server) -> None:
    expect_cancelled(server, command_of(server, "Say hello"), SETTINGS)


if __name__ == "__main__":
    tasks.main(
        globals(),
        {
            "structured output": "it asks for none",
            "images": "its command line takes none",
        },
    )
