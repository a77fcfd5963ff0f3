"""Nesting depth of a JSON text, found without parsing: parsers recurse, and a request must not exhaust the stack."""

from __future__ import annotations

import re

from moiety_platform.errors import BadRequest

MAX_CONTAINERS = 20_000  # objects and lists in one text; each costs far more after parsing than its bytes
_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


def check_depth(data: bytes, limit: int) -> None:
    """Check the nesting of brackets outside of strings. Raises BadRequest.

    The depth is at most `limit`, and the number of brackets is bounded. Linear, and without recursion.
    """
    depth = num_containers = 0
    for match in _BRACKETS.finditer(data):
        bracket = data[match.start()]
        if bracket in b"[{":
            depth += 1
            num_containers += 1
            if depth > limit:
                raise BadRequest(f"the JSON is nested deeper than {limit} levels; flatten it", code="json_too_deep")
            if num_containers > MAX_CONTAINERS:
                raise BadRequest(
                    f"the JSON has more than {MAX_CONTAINERS:,} objects and lists; send less", code="json_too_large"
                )
        elif bracket in b"]}":
            depth -= 1
