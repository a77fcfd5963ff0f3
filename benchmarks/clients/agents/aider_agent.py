"""Aider with one message about one file, by its OpenAI and its Anthropic provider, streamed and whole."""

from __future__ import annotations

import tasks
from commands import run_agent
from tasks import Server, expect

OPTIONS = ("--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--yes-always", "--no-gitignore")


def ask(server: Server, *arguments: str) -> None:
    settings = {
        "OPENAI_API_BASE": server.openai_url,
        "OPENAI_API_KEY": server.key,
        "ANTHROPIC_API_BASE": server.url,
        "ANTHROPIC_API_KEY": server.key,
    }
    made = run_agent(["aider", *OPTIONS, *arguments, "--message", "Say hello", "a.txt"], settings)
    expect("The answer is 42" in made.stdout and made.returncode == 0, (made.stdout + made.stderr)[-600:])


def chat(server: Server) -> None:
    ask(server, "--model", f"openai/{server.model}", "--no-stream")


def stream(server: Server) -> None:
    for provider in ("openai", "anthropic"):
        ask(server, "--model", f"{provider}/{server.model}")


if __name__ == "__main__":
    tasks.main({"chat": chat, "stream": stream})
