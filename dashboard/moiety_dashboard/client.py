"""HTTP client of the gateway's APIs, with the user's own credential.

ApiError
├── GatewayUnreachable    the gateway does not answer
├── KeyRefused     the gateway does not know the key, or the key is not an administrator's
├── RoleRefused    the administrator's role does not allow the action
└── ApiRefused     any other refusal; the message is the gateway's
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import httpx

from moiety_dashboard.escaping import show_unseen_in
from moiety_dashboard.gateway_state import Drawing
from moiety_dashboard.settings import without_password

CONNECT_TIMEOUT_S = 5.0
TIMEOUT_S = 12.0  # exceeds the gateway's longest wait for a queue slot
MAX_PAGES = 20
PAGE_LIMIT = 500
NUM_AT_ONCE = 3  # requests of one page: with SQLite the gateway has as many connections for the admin API
ADMIN = "/admin/v1"


class ApiError(Exception):
    """Base class; the message is for the dashboard's user."""


class GatewayUnreachable(ApiError):
    pass


class KeyRefused(ApiError):
    pass


class RoleRefused(ApiError):
    pass


class ApiRefused(ApiError):
    """The gateway refused the request; `code` is the gateway's."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Answer:
    """An admin API response and the equivalent shell command; `etag` is the version of an editable object.

    `truncated`: there are more rows than were requested.
    """

    data: Any
    query: str
    etag: str | None = None
    truncated: bool = False


class AdminClient:
    """The admin API at a URL, under one credential; all clients share `http`."""

    def __init__(
        self,
        url: str,
        credential: str,
        http: httpx.Client,
        drawing: Drawing | None = None,
        tenant_id: str | None = None,
    ) -> None:
        """Create the client. A `drawing` stores answers, and returns them while the gateway does not respond.

        `tenant_id` selects one of the roles of a user who has several.
        """
        self._drawing = drawing
        self._headers = {"Authorization": f"Bearer {credential}"}
        if tenant_id is not None:
            self._headers["X-Moiety-Tenant"] = tenant_id
        self._http = http
        self.url = url
        self._shown_url = without_password(url)

    def get(self, path: str, **parameters: Any) -> Answer:
        """Return the decoded answer of one GET; parameters that are None are omitted. Raises ApiError."""
        given = {name: value for name, value in parameters.items() if value is not None}
        if self._drawing is None:
            return self._get(path, given)
        key, part = self._drawing.key_of(path, given), self._drawing.part
        try:
            answer = self._get(path, given)
        except GatewayUnreachable:
            stored: Answer | None = self._drawing.stored.get(part, key)
            if stored is None:
                raise
            return stored
        self._drawing.stored.put(part, key, answer)
        return answer

    def get_all(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> Sequence[Answer]:
        """Return the answers of several GETs, paths and their parameters, sent at the same time. Raises ApiError."""
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            return list(pool.map(lambda one: self.get(one[0], **one[1]), requests))

    def _get(self, path: str, given: Mapping[str, Any]) -> Answer:
        response = self._send("GET", path, params=dict(given))
        return Answer(self._decode(response, path), self._command(path, given), response.headers.get("etag"))

    def list(self, path: str, **parameters: Any) -> Answer:
        """Return all rows of a paged list, up to MAX_PAGES pages. Raises ApiError."""
        rows: list[dict[str, Any]] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = self.get(path, limit=PAGE_LIMIT, cursor=cursor, **parameters).data
            rows += page["data"]
            cursor = page.get("next_cursor")
            if cursor is None:
                break
        given = {name: value for name, value in parameters.items() if value is not None}
        query = self._command(path, {"limit": PAGE_LIMIT, **given})
        return Answer(rows, query, truncated=cursor is not None)

    def ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Return the decoded answer of a POST that changes nothing. Raises ApiError."""
        return Answer(self._decode(self._send("POST", path, json=body), path), self._post_command(path, body))

    def ask_slowly(self, path: str, body: Mapping[str, Any], on_wait: Callable[[], None]) -> Answer:
        """Return the decoded answer of a POST whose answer begins with blanks while the gateway works. Raises ApiError.

        `on_wait` is called for each of them; an exception of it closes the connection, which ends the work.
        """
        parts = []
        try:
            with self._http.stream("POST", f"{self.url}{ADMIN}{path}", headers=self._headers, json=body) as response:
                if response.is_error:
                    response.read()
                    _check_answer(response)
                for part in response.iter_bytes():
                    parts.append(part)
                    on_wait()
        except httpx.HTTPError as exc:
            raise GatewayUnreachable(
                f"The gateway at {self._shown_url} does not respond ({type(exc).__name__})"
            ) from exc
        answer = httpx.Response(response.status_code, content=b"".join(parts))
        return Answer(self._decode(answer, path), self._post_command(path, body))

    def change(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, if_match: str | None = None
    ) -> Any:
        """Send one change and return the decoded answer. Raises ApiError."""
        headers = {} if if_match is None else {"If-Match": if_match}
        return self._decode(self._send(method, path, json=body, headers=headers), path)

    def _send(self, method: str, path: str, headers: Mapping[str, str] | None = None, **options: Any) -> httpx.Response:
        given = {**self._headers, **(headers or {})}
        if self._drawing is not None and self._drawing.is_away:
            raise GatewayUnreachable(f"The gateway at {self._shown_url} does not respond")
        try:
            response = self._http.request(method, f"{self.url}{ADMIN}{path}", headers=given, **options)
        except httpx.HTTPError as exc:
            if self._drawing is not None:
                self._drawing.is_away = True  # further requests of the drawing would wait as long
            raise GatewayUnreachable(
                f"The gateway at {self._shown_url} does not respond ({type(exc).__name__})"
            ) from exc
        _check_answer(response)
        return response

    def _decode(self, response: httpx.Response, path: str) -> Any:
        try:
            return show_unseen_in(response.json())
        except ValueError as exc:
            raise ApiRefused(f"{path} did not return JSON; check that {self._shown_url} is a gateway") from exc

    def _post_command(self, path: str, body: Mapping[str, Any]) -> str:
        url, data = shlex.quote(f"{self._shown_url}{ADMIN}{path}"), shlex.quote(json.dumps(body))
        return f'curl -s {url} -H "Authorization: Bearer $MOIETY_ADMIN_KEY" \\\n  --json {data}'

    def _command(self, path: str, parameters: Mapping[str, Any]) -> str:
        """Return the same request as a shell command that reads the key from its environment."""
        words = [f"  --data-urlencode {shlex.quote(f'{name}={value}')}" for name, value in parameters.items()]
        first = (
            f'curl -sG {shlex.quote(f"{self._shown_url}{ADMIN}{path}")} -H "Authorization: Bearer $MOIETY_ADMIN_KEY"'
        )
        return " \\\n".join([first, *words])


def _check_answer(response: httpx.Response) -> None:
    """Raise ApiError for an error answer."""
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        known = read_error(response, "code") == "missing_role"
        raise (RoleRefused if known else KeyRefused)(read_message(response))
    if response.is_error:
        raise ApiRefused(read_message(response), read_error(response, "code"))


def path_with(path: str, **parameters: str | None) -> str:
    """Return the path with a query of these parameters; those that are None are omitted."""
    return f"{path}?{urlencode({name: value for name, value in parameters.items() if value is not None})}"


def path_of(*segments: str) -> str:
    """Return a path of the admin API whose segments are names and ids, whatever they contain."""
    return "".join(f"/{quote(one, safe='')}" for one in segments)


def read_message(response: httpx.Response) -> str:
    """Return the message of an error answer in the gateway's form."""
    return read_error(response, "message") or f"HTTP {response.status_code}"


def read_error(response: httpx.Response, field: str) -> str | None:
    """Return a field of an error answer in the gateway's form; None for any other answer."""
    try:
        found = response.json()["error"][field]
    except (ValueError, KeyError, TypeError):
        return None
    return None if found is None else str(found)
