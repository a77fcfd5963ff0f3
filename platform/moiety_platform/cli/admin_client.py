"""Client of the admin API for the commands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from moiety_platform.cli.errors import CommandError, Refused
from moiety_platform.cli.gateway_client import DefaultKey, GatewayClient, answer

_ID = re.compile(r"[A-Za-z0-9_]{1,32}", re.ASCII)
PAGE_LIMIT = 500


@dataclass(frozen=True, slots=True)
class AdminClient(GatewayClient):
    """Client of one gateway with one admin key."""

    default_key = DefaultKey(lambda keys: keys.admin_key, "no admin key: give --admin-key or MOIETY_ADMIN_KEY")
    timeout_s = 30.0

    def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, **parameters: Any
    ) -> Any:
        """Call the API and return the decoded response. Raises NotReachable, NotAllowed or Refused."""
        wanted = {name: value for name, value in parameters.items() if value is not None}
        return answer(self.http, method, f"/admin/v1{path}", json=body, params=wanted, headers=headers).json()

    def dry_run(self, method: str, path: str, body: Any, headers: Mapping[str, str], **parameters: Any) -> None:
        """Send a change that the gateway only checks. Raises NotReachable, NotAllowed or Refused.

        Raises CommandError if the gateway has made the change, as one of an earlier release does.
        """
        wanted = {name: value for name, value in parameters.items() if value is not None}
        checked = answer(self.http, method, f"/admin/v1{path}", json=body, params=wanted, headers=headers)
        if checked.status_code != httpx.codes.NO_CONTENT:
            raise CommandError(
                f"the gateway ignores dry runs, so {method} {path} was done; upgrade all gateways, then apply again"
            )

    def knows_dry_runs(self, headers: Mapping[str, str]) -> bool:
        """Return whether the gateway knows the header of a dry run, which it then refuses for a GET."""
        try:
            self.call("GET", "/tenants", headers=headers, limit=1)
        except Refused:
            return True
        return False

    def tagged(self, path: str, **parameters: Any) -> tuple[dict[str, Any], str]:
        """Return one object and its ETag."""
        wanted = {name: value for name, value in parameters.items() if value is not None}
        found = answer(self.http, "GET", f"/admin/v1{path}", params=wanted)
        return found.json(), found.headers["ETag"]

    def pages(self, path: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """Yield all rows of a list, page by page."""
        cursor: str | None = None
        while True:
            page = self.call("GET", path, limit=PAGE_LIMIT, cursor=cursor, **parameters)
            yield from page["data"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def find_tenant(self, name_or_id: str) -> dict[str, Any]:
        """Return the tenant with this id, or else the one with this name. Raises CommandError.

        The id has precedence, so that a tenant whose name equals another's id never takes its place.
        """
        if _ID.fullmatch(name_or_id):
            try:
                return self.get(f"/tenants/{name_or_id}")
            except Refused as exc:
                if exc.param != "tenant_id":
                    raise
        found = list(self.pages("/tenants", name=name_or_id))
        if not found:
            raise CommandError(f"there is no tenant with the id or name {name_or_id!r}; see: moiety tenant list")
        return found[0]

    def find_project(self, tenant_id: str, name: str) -> dict[str, Any]:
        """Return the tenant's project with this id, or else the one with this name. Raises CommandError."""
        if _ID.fullmatch(name):
            try:
                project = self.get(f"/projects/{name}")
            except Refused as exc:
                if exc.param != "project_id":
                    raise
            else:
                if project["tenant_id"] == tenant_id:
                    return project
        found = list(self.pages("/projects", tenant_id=tenant_id, name=name))
        if not found:
            raise CommandError(f"the tenant has no project {name!r}; create it with: moiety project create {name}")
        return found[0]

    def get(self, path: str, **parameters: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.call("GET", path, **parameters)
        return answer
