"""OpenCode in run mode: a tool loop with its own shell tool by each of its three providers for a server like ours."""

from __future__ import annotations

import json

import tasks
from commands import run_agent
from tasks import Server, expect

PROVIDERS = ("@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic")


def ask(server: Server, provider: str) -> str:
    options = {"baseURL": server.openai_url, "apiKey": server.key}
    config = {
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            "moiety": {"npm": provider, "name": "Moiety", "options": options, "models": {server.model: {"name": "M"}}}
        },
    }
    settings = {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}
    made = run_agent(["opencode", "run", "-m", f"moiety/{server.model}", "Run echo moiety"], settings)
    expect(made.returncode == 0, (made.stdout + made.stderr)[-600:])
    return made.stdout


def tools(server: Server) -> None:
    for provider in PROVIDERS:
        output = ask(server, provider)
        expect("The tool says: moiety" in output, (provider, output))


if __name__ == "__main__":
    tasks.main({"stream": tools, "tools": tools})  # it streams every answer
