"""Terms of an agent run, as its first request gives them in a header. Pure.

`x-moiety-run: my-run; budget-usd=2.50; budget-tokens=200000; deadline-s=900; keep-s=300`
"""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from moiety_platform.errors import BadRequest, Forbidden
from moiety_platform.prices.token_cost import parse_dollars
from moiety_platform.usage.attribution import Attribution, tags_of

RUN_HEADER = "x-moiety-run"
RUN_TAG = "moiety_run"  # the tag of the usage rows, and the key of `metadata` in place of the header
MAX_NAME_CHARS = 64
MAX_BUDGET_TOKENS = 10**12
MAX_DEADLINE_S = 30 * 24 * 3600
MAX_KEEP_S = 24 * 3600
RUN_STOPPED, RUN_DEADLINE_PASSED, RUN_BUDGET_EXHAUSTED = "run_stopped", "run_deadline_passed", "run_budget_exhausted"

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.:-]{{0,{MAX_NAME_CHARS - 1}}}", re.ASCII)
_FORM = "write RUN; budget-usd=2.50; budget-tokens=200000; deadline-s=900; keep-s=300, of which only RUN is needed"
_TAG = f'"{RUN_TAG}":'
_NUMBERS = {"budget-tokens": MAX_BUDGET_TOKENS, "deadline-s": MAX_DEADLINE_S, "keep-s": MAX_KEEP_S}


class RunStatus(StrEnum):
    """State of a run, which says whether it takes requests."""

    ACTIVE = "active"
    STOPPED = "stopped"


class RunTerms(msgspec.Struct, frozen=True):
    """Name and terms of a run. None: not given. `budget_nano` is in nano-dollars."""

    name: str
    budget_nano: int | None = None
    budget_tokens: int | None = None
    deadline_s: int | None = None  # after the first request
    keep_s: int | None = None  # retention of the requests' KV


def names_run(tags: str | None) -> bool:
    """Return whether the tags of a request may name a run."""
    return tags is not None and _TAG in tags


def named_run(header: bytes | None, attribution: Attribution) -> str:
    """Return the text that names the run of a request: that of the header, or the value of the tag."""
    return tags_of(attribution.tags).get(RUN_TAG, "") if header is None else header.decode("latin-1")


def parse_run(text: str) -> RunTerms:
    """Return the terms in the header, or in the value of `metadata`. Raises BadRequest."""
    name, *given = (part.strip() for part in text.split(";"))
    if not _NAME.fullmatch(name):
        raise _bad(f"{name[:64]!r} is not a name of 1 to {MAX_NAME_CHARS} letters, digits, '_', '.', ':' and '-'")
    found: dict[str, int] = {}
    for part in given:
        field, _, value = part.partition("=")
        if field in found or field not in ("budget-usd", *_NUMBERS):
            raise _bad(f"{part[:64]!r} is not known, or is given twice")
        if field == "budget-usd":
            try:
                found[field] = parse_dollars(value)
            except ValueError as exc:
                raise _bad(str(exc)) from exc
        elif not (value.isascii() and value.isdigit() and 0 < int(value[:20]) <= _NUMBERS[field]):
            raise _bad(f"{field} must be a number from 1 to {_NUMBERS[field]}")
        else:
            found[field] = int(value)
    return RunTerms(name, found.get("budget-usd"), *(found.get(field) for field in _NUMBERS))


def stopped(name: str) -> Forbidden:
    """Return the error of a request of a run that was stopped."""
    return Forbidden(f"the run {name!r} was stopped; begin another one", code=RUN_STOPPED)


def deadline_passed(name: str) -> Forbidden:
    """Return the error of a request of a run after its deadline."""
    return Forbidden(f"the deadline of the run {name!r} has passed; begin another one", code=RUN_DEADLINE_PASSED)


def budget_exhausted(name: str) -> Forbidden:
    """Return the error of a request that the rest of its run's budget does not cover."""
    advice = "shorten it, or begin another run"
    message = f"the rest of the budget of the run {name!r} does not cover this request; {advice}"
    return Forbidden(message, code=RUN_BUDGET_EXHAUSTED)


def model_without_price(name: str) -> Forbidden:
    """Return the error of a request whose cost is not known, in a run with a budget of money."""
    message = f"the run {name!r} has a budget of money, but this model has no price; an administrator can set one"
    return Forbidden(message, code="model_without_price")


def _bad(why: str) -> BadRequest:
    return BadRequest(f"'{RUN_HEADER}': {why}; {_FORM}", code="invalid_run", param=RUN_HEADER)
