"""Claude Code in print mode: tool loops with its own tools, an edited file, images, reasoning, its stream of events."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

import tasks
from cancellation import expect_cancelled
from commands import FILE, run_agent
from tasks import CITY_SCHEMA, LONG_TEXT, PIXEL, Server, expect

EDIT = f"""Call Read with {{"file_path": "{FILE}"}}
Call Edit with {{"file_path": "{FILE}", "old_string": "hello", "new_string": "goodbye"}}
Call Bash with {{"command": "cat a.txt", "description": "show the file"}}"""


DELEGATE = """Call Agent with {"description": "say", "prompt": "Run echo moiety", "subagent_type": "general-purpose", \
"model": "haiku", "run_in_background": false}"""
SEARCH = """Call ToolSearch with {"query": "select:WebFetch", "max_results": 1}
Call Bash with {"command": "echo found", "description": "say it"}"""


def settings_of(server: Server) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_MODEL": server.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": server.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def ask(server: Server, prompt: str, *arguments: str, message: object = None) -> subprocess.CompletedProcess[str]:
    written = None if message is None else json.dumps({"type": "user", "message": message})
    return run_agent(["claude", "-p", prompt, *arguments], settings_of(server), written)


def tools(server: Server) -> None:
    made = ask(server, "Run echo moiety", "--allowedTools", "Bash")
    expect(made.stdout.strip() == "The tool says: moiety", made)
    made = ask(server, EDIT, "--allowedTools", "Read,Edit,Bash")
    expect(made.stdout.strip() == "The tool says: goodbye", made)
    made = ask(server, DELEGATE, "--allowedTools", "Agent,Bash")
    expect("The tool says:" in made.stdout and "error" not in made.stdout.lower(), made)
    made = ask(server, SEARCH, "--allowedTools", "ToolSearch,Bash")
    expect(made.stdout.strip() == "The tool says: found", made)


def stream(server: Server) -> None:
    made = ask(
        server,
        "Run echo moiety",
        "--allowedTools",
        "Bash",
        "--output-format",
        "stream-json",
        "--verbose",
        "--include-partial-messages",
    )
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


def images(server: Server) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    content = [{"type": "text", "text": "What is it?"}, {"type": "image", "source": source}]
    forms = ("--input-format", "stream-json", "--output-format", "stream-json", "--verbose")
    made = ask(server, "", *forms, "--tools", "", message={"role": "user", "content": content})
    expect(tasks.SEEN in made.stdout, made)
    file = Path("pixel.png").absolute()
    file.write_bytes(base64.b64decode(PIXEL))
    read = f'Call Read with {{"file_path": "{file}"}}'
    made = ask(server, read, "--allowedTools", "Read", "--add-dir", str(file.parent))
    expect(made.returncode == 0 and "The tool says" in made.stdout, made)


def long_prompt(server: Server) -> None:
    made = ask(server, f"{LONG_TEXT * 10}\nUse no tools.")  # its own prompt has 100 KB more
    expect(made.returncode == 0 and "42" in made.stdout, made)


def cancel(server: Server) -> None:
    expect_cancelled(server, ["claude", "-p", "Say hello"], settings_of(server))


if __name__ == "__main__":
    tasks.main(globals())
