"""The gateway's admin API, asked over HTTP with the user's own key.

ApiError
├── GatewayAway   it does not answer
├── KeyRefused    it does not know the key, or the key is no administrator's
├── RoleRefused   this administrator may not see that
└── ApiRefused    any other refusal; the message is the gateway's
"""

from __future__ import annotations

from typing import Any

import httpx

TIMEOUT_S = 5.0
MAX_PAGES = 20
PAGE_LIMIT = 500


class ApiError(Exception):
    """Root; the message is for the reader of the dashboard."""


class GatewayAway(ApiError):
    pass


class KeyRefused(ApiError):
    pass


class RoleRefused(ApiError):
    pass


class ApiRefused(ApiError):
    pass


class AdminClient:
    """Reads only. `transport` is for tests."""

    def __init__(self, url: str, admin_key: str, transport: httpx.BaseTransport | None = None) -> None:
        headers = {"Authorization": f"Bearer {admin_key}"}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, transport=transport)

    def get(self, path: str, **parameters: Any) -> Any:
        """The decoded answer of one GET. Raises ApiError."""
        try:
            response = self._client.get(path, params=parameters)
        except httpx.HTTPError as exc:
            raise GatewayAway(f"the gateway at {self._client.base_url} does not answer ({type(exc).__name__})") from exc
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            known = read_error(response, "code") == "missing_role"
            raise (RoleRefused if known else KeyRefused)(read_message(response))
        if response.is_error:
            raise ApiRefused(f"{path} answered {response.status_code}: {read_message(response)}")
        try:
            return response.json()
        except ValueError as exc:
            raise ApiRefused(f"{path} did not answer with JSON; is {self._client.base_url} a gateway?") from exc

    def list(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        """All rows of a paged list, up to MAX_PAGES pages. Raises ApiError."""
        rows: list[dict[str, Any]] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = self.get(path, limit=PAGE_LIMIT, **parameters, **({"cursor": cursor} if cursor else {}))
            rows += page["data"]
            cursor = page.get("next_cursor")
            if cursor is None:
                break
        return rows

    def close(self) -> None:
        self._client.close()


def read_message(response: httpx.Response) -> str:
    """The message of an error answer in the gateway's form."""
    return read_error(response, "message") or f"HTTP {response.status_code}"


def read_error(response: httpx.Response, field: str) -> str | None:
    """A field of an error answer in the gateway's form; None of any other answer."""
    try:
        return str(response.json()["error"][field])
    except (ValueError, KeyError, TypeError):
        return None
