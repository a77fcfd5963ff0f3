"""Attribution of a request: the end user and the tags that its sender names, for the sender's own accounting.

Both are bounded here, whatever the API allows: they are stored with the usage row of each request. They are no labels
of metrics and no keys of the sums that requests write, since a client can name any number of users. Sums by them are
made later (`attributed_sums.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from moiety_platform.errors import BadRequest
from moiety_platform.openapi.tags_header import (
    MAX_TAG_NAME_CHARS,
    MAX_TAG_VALUE_CHARS,
    MAX_TAGS,
    TAG_NAME,
    TAGS_HEADER,
    TAGS_PATTERN,
)

MAX_END_USER_CHARS = 256  # of a column; a longer name is stored as its hash

_HEADER = re.compile(TAGS_PATTERN)
_TAG_NAME = re.compile(TAG_NAME)
_SESSION = re.compile(r"(user_[^_]+_account_[^_]*)_session_.*", re.DOTALL)
_FORM = "such as team=search, feature=chat"


class Attribution(msgspec.Struct, frozen=True):
    """End user and tags of a request, as its usage row stores them. `tags` is a JSON object with sorted names."""

    end_user: str | None = None
    tags: str | None = None


UNATTRIBUTED = Attribution()


def attribution_of(end_user: str | None, metadata: Mapping[str, str], header: bytes | None) -> Attribution:
    """Return the attribution of a request. Raises BadRequest for tags in the header that are not in their form.

    `metadata` are pairs of the body, for any purpose of the client: those that can be tags become tags, after those of
    the header, until there are MAX_TAGS.
    """
    if header is None and not end_user and not metadata:
        return UNATTRIBUTED
    tags = {} if header is None else parse_tags(header.decode("latin-1"))
    for name, value in metadata.items():
        if len(tags) < MAX_TAGS and name not in tags and _is_tag(name, value):
            tags[name] = value
    return Attribution(stored_end_user(end_user) if end_user else None, _encode_tags(tags) if tags else None)


def tagged_attribution(attribution: Attribution, name: str, value: str) -> Attribution:
    """Return the attribution with one more tag, which takes the place of the last one if there are MAX_TAGS."""
    tags = {tag: other for tag, other in tags_of(attribution.tags).items() if tag != name}
    kept = dict(list(tags.items())[: MAX_TAGS - 1])
    return Attribution(attribution.end_user, _encode_tags({**kept, name: value}))


def parse_tags(text: str) -> dict[str, str]:
    """Return the tags of a header. Of several with one name, the last counts. Raises BadRequest."""
    if _HEADER.fullmatch(text) is None:
        raise _bad(
            f"{text[:64]!r} is not a valid list of tags; write 1 to {MAX_TAGS} of them, {_FORM}, with names of at most "
            f"{MAX_TAG_NAME_CHARS} letters, digits, '.', '_' and '-', and values of at most {MAX_TAG_VALUE_CHARS} "
            "visible ASCII characters without commas",
            TAGS_HEADER,
        )
    return dict(part.strip().split("=", 1) for part in text.split(","))


def parse_tag(text: str, param: str) -> tuple[str, str]:
    """Return name and value of `name=value`. Raises BadRequest."""
    name, _, value = text.partition("=")
    if not _is_tag(name, value):
        raise _bad(f"{text[:64]!r} is not a valid tag; write its name and its value, such as team=search", param)
    return name, value


def is_tag_name(name: str) -> bool:
    """Return whether a tag can have this name."""
    return _TAG_NAME.fullmatch(name) is not None


def tags_of(stored: str | None) -> dict[str, str]:
    """Return the tags of a usage row."""
    return {} if stored is None else msgspec.json.decode(stored, type=dict[str, str])


def stable_user_id(user_id: str) -> str:
    """Return the part of Anthropic's `metadata.user_id` that stays the same over sessions.

    Claude Code appends the session, in one of two forms. Any other id is returned as it is.
    """
    if user_id.startswith("{"):
        try:
            parts = msgspec.json.decode(user_id, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return user_id
        known = [parts.get(name) for name in ("account_uuid", "device_id")]
        return next((one for one in known if isinstance(one, str) and one), user_id)
    found = _SESSION.fullmatch(user_id)
    return user_id if found is None else found[1]


def _is_tag(name: str, value: str) -> bool:
    return is_tag_name(name) and 0 < len(value) <= MAX_TAG_VALUE_CHARS and value.isprintable()


def _encode_tags(tags: dict[str, str]) -> str:
    return msgspec.json.encode(dict(sorted(tags.items()))).decode()


def stored_end_user(end_user: str) -> str:
    """Return an end user as usage rows store it: printable, and hashed if it is too long."""
    if len(end_user) <= MAX_END_USER_CHARS:
        return end_user if end_user.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in end_user)
    return f"sha256:{hashlib.sha256(end_user.encode('utf-8', 'replace')).hexdigest()}"


def _bad(why: str, param: str) -> BadRequest:
    return BadRequest(f"'{param}': {why}", code="invalid_tags", param=param)
