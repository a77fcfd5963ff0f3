"""Comparison of bills with engines' journals: the billed and the counted output tokens of each request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from moiety_platform.cli.errors import CommandError
from moiety_platform.errors import WAIVED

MAX_SHOWN = 100
NEVER_BILLED = ("rejected",)  # nothing of the answer was sent


class _Line(msgspec.Struct):
    """Compared fields of a line of an engine's journal."""

    at_unix_ns: int
    request_id: str  # of one answer: the request's id and the answer's number
    output_tokens: int


_decoder = msgspec.json.Decoder(_Line)


def read_journals(paths: Iterable[Path], since: datetime) -> dict[str, dict[str, int]]:
    """Return output tokens by request id and answer id, of requests that ended since `since`.

    If several engines worked on an answer, each counts everything before it too, so the highest count is used. Raises
    CommandError for a file that is not a journal.
    """
    counted: dict[str, dict[str, int]] = {}
    for path in paths:
        for number, text in enumerate(path.read_bytes().splitlines(), 1):
            try:
                line = _decoder.decode(text)
            except msgspec.MsgspecError as exc:
                raise CommandError(
                    f"{path}, line {number} is not a valid line of an engine's usage journal: {exc}"
                ) from exc
            if line.at_unix_ns < since.timestamp() * 1e9:
                continue
            request_id = line.request_id.rpartition("-")[0]
            answers = counted.setdefault(request_id, {})
            answers[line.request_id] = max(line.output_tokens, answers.get(line.request_id, 0))
    return counted


def _was_waived(row: Mapping[str, Any]) -> bool:
    """Return whether the request is not billed because no part of its answer was sent."""
    return row.get("error_code") in {error.default_code for error in WAIVED} and not row["output_tokens"]


def compare(counted: Mapping[str, Mapping[str, int]], requests: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the requests whose bill differs from the count.

    `unproven` are those in no journal, because their engine was killed, or lost the gateway before their end.
    """
    differences, compared = [], 0
    for request_id, answers in counted.items():
        row = requests.get(request_id)
        if row is not None and (row["outcome"] in NEVER_BILLED or _was_waived(row)):
            continue
        compared += 1
        billed, total = None if row is None else row["output_tokens"], sum(answers.values())
        if billed != total:
            differences.append({"request_id": request_id, "billed": billed, "counted": total})
    unproven = sum(row["output_tokens"] > 0 and request_id not in counted for request_id, row in requests.items())
    return {"compared": compared, "unproven": unproven, "differences": differences[:MAX_SHOWN]}
