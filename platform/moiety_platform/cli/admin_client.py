"""The admin API for the commands: which gateway, which key, and answers or errors with an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from moiety_platform.cli.errors import CommandError, NotAllowed, NotReachable
from moiety_platform.supervisor.data_dir import read_first_keys, read_url
from moiety_platform.supervisor.errors import SupervisorError

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0
PAGE_LIMIT = 500


@dataclass(frozen=True, slots=True)
class AdminClient:
    """One gateway and one admin key."""

    http: httpx.Client

    @classmethod
    def connect(cls, url: str | None, admin_key: str | None, data_dir: Path) -> AdminClient:
        """From what was given, else from a local serve's data directory. Raises CommandError if there is no key."""
        if admin_key is None:
            try:
                keys = read_first_keys(data_dir)
            except SupervisorError as exc:
                raise CommandError(str(exc)) from exc
            if keys is None:
                raise CommandError(
                    f"no admin key: give --admin-key or MOIETY_ADMIN_KEY, or a --data-dir that a serve has used "
                    f"(there is none in {data_dir})"
                )
            admin_key = keys.admin_key
        address = url or read_url(data_dir) or DEFAULT_URL
        headers = {"Authorization": f"Bearer {admin_key}"}
        return cls(httpx.Client(base_url=address, headers=headers, timeout=TIMEOUT_S))

    def call(self, method: str, path: str, body: Any = None, **parameters: Any) -> Any:
        """The decoded answer. Raises NotReachable, NotAllowed or CommandError."""
        wanted = {name: value for name, value in parameters.items() if value is not None}
        try:
            response = self.http.request(method, f"/admin/v1{path}", json=body, params=wanted)
        except httpx.HTTPError as exc:
            raise NotReachable(
                f"the gateway at {self.http.base_url} does not answer ({type(exc).__name__}); is it running?"
            ) from exc
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise NotAllowed(read_message(response))
        if response.is_error:
            raise CommandError(read_message(response))
        return response.json()

    def pages(self, path: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """All rows of a list, page by page."""
        cursor: str | None = None
        while True:
            page = self.call("GET", path, limit=PAGE_LIMIT, cursor=cursor, **parameters)
            yield from page["data"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def find_tenant(self, name_or_id: str) -> dict[str, Any]:
        """A tenant by its name, or else by its id. Raises CommandError."""
        found = list(self.pages("/tenants", name=name_or_id))
        return found[0] if found else self.get(f"/tenants/{name_or_id}")

    def find_project(self, tenant_id: str, name: str) -> dict[str, Any]:
        """A tenant's project by its name. Raises CommandError."""
        found = list(self.pages("/projects", tenant_id=tenant_id, name=name))
        if not found:
            raise CommandError(f"the tenant has no project {name!r}; make it with: moiety project create {name}")
        return found[0]

    def get(self, path: str, **parameters: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.call("GET", path, **parameters)
        return answer


def read_message(response: httpx.Response) -> str:
    """The message of an error answer, or what there is of it."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.request.url} answered {response.status_code}; is it a Moiety gateway?"
