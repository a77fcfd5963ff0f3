"""Lines of an input file that are to be answered, in the order that fills a batch best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from moiety_platform.batches.endpoints import ENDPOINTS
from moiety_platform.batches.input_lines import Line, RawLine, Splitter, check_unused, read_line
from moiety_platform.cli.errors import CommandError
from moiety_platform.errors import BadRequest
from moiety_platform.inference.body_fields import GeneratingBody
from moiety_platform.openai_api.schemas import COMPLETION_DEFAULT_MAX_TOKENS

MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_JSON_DEPTH = 128
PIECE_BYTES = 1024 * 1024
SHOWN = 10  # invalid lines that are listed

_BYTES_A_TOKEN = 4
_OUTPUT_TOKENS = 256  # of a chat without a maximum
_CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Work:
    """A line's place in the file, and its approximate number of tokens.

    The key is a hash of the line's text and the model, so a changed line has another key.
    """

    number: int
    start: int
    num_bytes: int
    custom_id: str
    key: str
    predicted_tokens: int


class _Sizes(msgspec.Struct, frozen=True):
    """Length parameters of a body, if they are valid."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None


def read_work(file: Path, model: str) -> list[Work]:
    """Return every line, the longest first: the last lines are short, so the batch stays full.

    Raises CommandError that names the lines without an id of their own, since their answers could not be told apart.
    """
    found: list[Work] = []
    wrong: list[str] = []
    seen: dict[str, int] = {}
    for raw in _lines(file):
        try:
            line = read_line(raw, MAX_LINE_BYTES, MAX_JSON_DEPTH)
            check_unused(line.custom_id, raw.number, seen)
        except BadRequest as exc:
            wrong.append(f"line {raw.number}: {exc.message}")
            continue
        key = blake2b(b"\0".join((model.encode(), raw.text or b"")), digest_size=16).hexdigest()
        found.append(Work(raw.number, raw.start, raw.num_bytes, line.custom_id, key, _predict_tokens(line)))
    if wrong:
        more = f"\n… and {len(wrong) - SHOWN:,} more" if len(wrong) > SHOWN else ""
        raise CommandError(f"{file} cannot be answered; correct these lines:\n" + "\n".join(wrong[:SHOWN]) + more)
    return sorted(found, key=lambda work: -work.predicted_tokens)


def _lines(file: Path) -> Iterator[RawLine]:
    splitter = Splitter(MAX_LINE_BYTES)
    with file.open("rb") as data:
        while piece := data.read(PIECE_BYTES):
            yield from splitter.take(piece)
    yield from splitter.finish()


def _predict_tokens(line: Line) -> int:
    """Predict the tokens of a line without a tokenizer, for the order only."""
    num_input = len(bytes(line.body)) // _BYTES_A_TOKEN
    if line.url not in ENDPOINTS or not issubclass(ENDPOINTS[line.url].schema, GeneratingBody):
        return num_input
    try:
        sizes = msgspec.json.decode(bytes(line.body), type=_Sizes)
    except msgspec.MsgspecError:  # its answer reports the error
        return num_input
    default_tokens = _OUTPUT_TOKENS if line.url == _CHAT_PATH else COMPLETION_DEFAULT_MAX_TOKENS
    return num_input + (sizes.max_completion_tokens or sizes.max_tokens or default_tokens) * (sizes.n or 1)
