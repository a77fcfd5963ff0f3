"""OpenCode in run mode: tool loops with its own tools by each of its three providers for a server like ours."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import tasks
from cancellation import expect_cancelled
from commands import FILE, run_agent
from tasks import LONG_TEXT, PIXEL, Server, expect

PROVIDERS = ("@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic")
EDIT = f"""Call read with {{"filePath": "{FILE}"}}
Call edit with {{"filePath": "{FILE}", "oldString": "hello", "newString": "goodbye"}}
Call bash with {{"command": "cat a.txt", "description": "show the file"}}"""


def settings_of(server: Server, provider: str) -> dict[str, str]:
    model = {
        "name": "M",
        "attachment": True,
        "reasoning": True,
        "modalities": {"input": ["text", "image"], "output": ["text"]},
    }
    options = {"baseURL": server.openai_url, "apiKey": server.key}
    config = {
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            "moiety": {"npm": provider, "name": "Moiety", "options": options, "models": {server.model: model}}
        },
    }
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


def command_of(server: Server, *arguments: str) -> list[str]:
    return ["opencode", "run", "-m", f"moiety/{server.model}", *arguments]


def ask(server: Server, provider: str, *arguments: str, written: str | None = None) -> str:
    made = run_agent(command_of(server, *arguments), settings_of(server, provider), written)
    expect(made.returncode == 0, (made.stdout + made.stderr)[-600:])
    return made.stdout


def chat(server: Server) -> None:
    for provider in PROVIDERS:
        output = ask(server, provider, "Say hello.\nUse no tools.")
        expect("42" in output, (provider, output))


def tools(server: Server) -> None:
    for provider in PROVIDERS:
        output = ask(server, provider, "Run echo moiety")
        expect("The tool says: moiety" in output, (provider, output))
    output = ask(server, PROVIDERS[0], "Edit it.", written=EDIT)  # it would escape the quotes of an argument
    expect("The tool says: goodbye" in output, output)


def thoughts(server: Server) -> None:
    for provider in (PROVIDERS[0], PROVIDERS[2]):  # of the responses API it shows summaries, which there are none of
        output = ask(server, provider, "--thinking", "Say hello.\nUse no tools.")
        expect("The tool knows it." in output, (provider, output))


def images(server: Server) -> None:
    file = Path("pixel.png").absolute()
    file.write_bytes(base64.b64decode(PIXEL))
    for provider in PROVIDERS:
        output = ask(server, provider, "What is it?", "-f", str(file))
        expect(tasks.SEEN in output, (provider, output))


def long_prompt(server: Server) -> None:
    output = ask(server, PROVIDERS[0], f"{LONG_TEXT * 10}\nUse no tools.")
    expect("42" in output, output)


def cancel(server: Server) -> None:
    for provider in PROVIDERS:
        expect_cancelled(server, command_of(server, "Say hello"), settings_of(server, provider))


if __name__ == "__main__":
    tasks.main({**globals(), "stream": chat}, {"structured output": "it asks for none"})
