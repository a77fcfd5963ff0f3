"""Aider with one message about one file, by its OpenAI and its Anthropic provider, streamed and whole."""

from __future__ import annotations

from pathlib import Path

import tasks
from cancellation import expect_cancelled
from commands import run_agent
from tasks import LONG_TEXT, Server, expect

OPTIONS = ("--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--yes-always", "--no-gitignore")


def settings_of(server: Server) -> dict[str, str]:
    return {
        "OPENAI_API_BASE": server.openai_url,
        "OPENAI_API_KEY": server.key,
        "ANTHROPIC_API_BASE": server.url,
        "ANTHROPIC_API_KEY": server.key,
    }


def command_of(*arguments: str) -> list[str]:
    return ["aider", *OPTIONS, *arguments, "--message", "Say hello", "a.txt"]


def ask(server: Server, *arguments: str) -> str:
    made = run_agent(command_of(*arguments), settings_of(server))
    expect("The answer is 42" in made.stdout and made.returncode == 0, (made.stdout + made.stderr)[-600:])
    return made.stdout


def chat(server: Server) -> None:
    ask(server, "--model", f"openai/{server.model}", "--no-stream")


def stream(server: Server) -> None:
    for provider in ("openai", "anthropic"):
        ask(server, "--model", f"{provider}/{server.model}")


def thoughts(server: Server) -> None:
    for provider in ("openai", "anthropic"):
        made = ask(server, "--model", f"{provider}/{server.model}")
        expect("THINKING" in made, made[-600:])


def long_prompt(server: Server) -> None:
    file = Path("long.txt").absolute()
    file.write_text(LONG_TEXT * 10)
    ask(server, "--model", f"openai/{server.model}", "--read", str(file))


def cancel(server: Server) -> None:
    for provider in ("openai", "anthropic"):
        expect_cancelled(server, command_of("--model", f"{provider}/{server.model}"), settings_of(server))


if __name__ == "__main__":
    tasks.main(
        globals(),
        {
            "tools": "it reads edits from the text of answers",
            "structured output": "it asks for none",
            "images": "it sends them only to models that its own list says can see",
        },
    )
