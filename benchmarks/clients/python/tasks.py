"""Frame of a Python client's tasks: run each by its name and print one JSON line with its outcome.

    MOIETY_DEMO_URL=… MOIETY_DEMO_KEY=… python openai_sdk.py chat stream …

A task is a function of a Server, named as the task, that raises where the client did not get what it should. It knows
only the client.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

QUESTION = "How warm is it in Basel?"
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
RESULT = "17 degrees"
ANSWER = f"The tool says: {RESULT}"
LONG_TEXT = " ".join(f"Line {number} says that the river rises." for number in range(80))
MIN_LONG_TOKENS = 1000
PIXEL = (  # a PNG of one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PIXEL_URL = f"data:image/png;base64,{PIXEL}"
SEEN = "an image of 1 × 1 pixels"  # in an answer to it
TIMEOUT_S = 60.0
_REFUSED_STATUS = 400
_DETAIL_CHARS = 300


@dataclass(frozen=True, slots=True)
class Server:
    """Gateway that a task asks. `url` has no path; `admin_key` is for its reports of requests and engines."""

    url: str
    key: str
    model: str
    admin_key: str

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"


Task = Callable[[Server], None]


def temperature_of(city: str) -> str:
    """Return how warm it is in a city.

    Args:
        city: Name of the city.

    """
    assert city == "Basel", f"the tool was called with {city!r}"
    return RESULT


def expect(condition: object, got: object) -> None:
    """Fail the task, naming what came instead."""
    if not condition:
        raise AssertionError(f"got {got!r}"[:_DETAIL_CHARS])


def main(functions: dict[str, Any], absent: dict[str, str] | None = None) -> None:
    """Run the tasks named on the command line, each by the function of its name: "long prompt" by `long_prompt`.

    `functions` are the globals of the client's file. `absent` has the reason for each task that the client cannot do.
    """
    for name in sys.argv[1:]:
        reason = (absent or {}).get(name)
        outcome, detail = ("not applicable", reason) if reason else _run(functions[name.replace(" ", "_")], name)
        print(json.dumps({"task": name, "outcome": outcome, "detail": detail}), flush=True)


def _run(task: Task, name: str) -> tuple[str, str]:
    try:
        task(_server_of(name))
    except BaseException as exc:
        traceback.print_exc()
        refusal = next((one for one in _chain(exc) if _status_of(one) == _REFUSED_STATUS), None)
        if refusal is not None:
            return "refused", str(refusal)[:_DETAIL_CHARS]
        return "fail", f"{type(exc).__name__}: {exc}"[:_DETAIL_CHARS]
    return "pass", ""


def _server_of(task: str) -> Server:
    kind = os.environ["MOIETY_TASK_SERVERS"]
    name = json.loads(kind)[task].upper()
    return Server(*(os.environ[f"MOIETY_{name}_{part}"] for part in ("URL", "KEY", "MODEL", "ADMIN_KEY")))


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__


def _status_of(exc: BaseException) -> Any:
    status = getattr(exc, "status_code", None) or getattr(exc, "status", None)
    return status if status is not None else getattr(getattr(exc, "response", None), "status_code", None)
