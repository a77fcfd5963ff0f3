"""Served models in Anthropic's fields. Clients that send `anthropic-version` get them so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, TypedDict
from urllib.parse import parse_qsl

from moiety_platform.errors import BadRequest
from moiety_platform.query_parameters import parse_whole
from moiety_wire.messages import ModelCard

DEFAULT_PAGE = 20
MAX_PAGE = 1000
LIFECYCLE = frozenset({"lifecycle", "lifecycle[]"})  # names of the query parameter, as clients write it
ACTIVE = "active"


class ModelInfo(TypedDict):
    """A served model."""

    id: str
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelPage(TypedDict):
    """A page of the models that the key may use. The ids are those of its first and its last model."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_info(name: str, card: ModelCard) -> ModelInfo:
    created_at = datetime.fromtimestamp(card.created_unix_s, UTC)
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": created_at.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card.max_context_tokens,
        "max_tokens": card.max_context_tokens,
    }


def includes_active(query: bytes) -> bool:
    """Return whether a query string asks for active models, which all served models are.

    Without a parameter of LIFECYCLE it asks for models in any state.
    """
    states = [value for name, value in parse_qsl(query.decode("latin-1")) if name in LIFECYCLE]
    return not states or ACTIVE in states


def parse_limit(limit: str | None) -> int:
    """Return the number of models in a page. Raises BadRequest."""
    most = DEFAULT_PAGE if limit is None else parse_whole(limit, "limit")
    if not 1 <= most <= MAX_PAGE:
        raise BadRequest(f"'limit' must be between 1 and {MAX_PAGE:,}, not {most}", param="limit")
    return most


def model_page(cards: Mapping[str, ModelCard], most: int, before_id: str | None, after_id: str | None) -> ModelPage:
    """Return the models before or after one of them, in their order, at most `most`.

    Raises BadRequest for an unknown id, and for both ids.
    """
    if before_id is not None and after_id is not None:
        raise BadRequest("'before_id' and 'after_id' exclude each other; send only one", param="before_id")
    names = list(cards)
    if before_id is not None:
        rest = names[: _place(names, before_id, "before_id")]
        page = rest[-most:]
    else:
        rest = names if after_id is None else names[_place(names, after_id, "after_id") + 1 :]
        page = rest[:most]
    return {
        "data": [model_info(name, cards[name]) for name in page],
        "has_more": len(page) < len(rest),
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }


def _place(names: Sequence[str], name: str, param: str) -> int:
    if name not in names:
        raise BadRequest(f"there is no model {name[:256]!r}; send the id of a model in the list", param=param)
    return names.index(name)
