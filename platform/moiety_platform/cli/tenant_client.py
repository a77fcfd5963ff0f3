"""The tenants' API for the commands: which gateway, which key, and answers or errors with an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from moiety_platform.cli.admin_client import DEFAULT_URL, read_message
from moiety_platform.cli.errors import CommandError, NotAllowed, NotReachable
from moiety_platform.supervisor.data_dir import read_first_keys, read_url
from moiety_platform.supervisor.errors import SupervisorError

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class TenantClient:
    """One gateway and one tenant's key."""

    http: httpx.Client

    @classmethod
    def connect(cls, url: str | None, key: str | None, data_dir: Path) -> TenantClient:
        """From what was given, else from a local serve's data directory. Raises CommandError if there is no key."""
        if key is None:
            try:
                keys = read_first_keys(data_dir)
            except SupervisorError as exc:
                raise CommandError(str(exc)) from exc
            if keys is None:
                raise CommandError(
                    f"no tenant's key: give --key or MOIETY_KEY, or a --data-dir that a serve has used "
                    f"(there is none in {data_dir})"
                )
            key = keys.tenant_key
        address = (url or read_url(data_dir) or DEFAULT_URL).rstrip("/")
        headers = {"Authorization": f"Bearer {key}"}
        return cls(httpx.Client(base_url=f"{address}/v1", headers=headers, timeout=TIMEOUT_S))

    def call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        """The decoded answer. Raises NotReachable, NotAllowed or CommandError."""
        try:
            response = self.http.request(method, path, **request)
        except httpx.HTTPError as exc:
            raise self._unreachable(exc) from exc
        _raise_for_status(response)
        answer: dict[str, Any] = response.json()
        return answer

    def upload(self, name: str, content: BinaryIO) -> dict[str, Any]:
        """A file for a batch. Raises like `call`."""
        return self.call("POST", "/files", data={"purpose": "batch"}, files={"file": (name, content)})

    def download(self, file_id: str) -> Iterator[bytes]:
        """A file's content, piece by piece. Raises like `call`."""
        try:
            with self.http.stream("GET", f"/files/{file_id}/content") as response:
                if response.is_error:
                    response.read()
                _raise_for_status(response)
                yield from response.iter_bytes()
        except httpx.HTTPError as exc:
            raise self._unreachable(exc) from exc

    def _unreachable(self, exc: httpx.HTTPError) -> NotReachable:
        kind = type(exc).__name__
        return NotReachable(f"the gateway at {self.http.base_url} does not answer ({kind}); is it running?")


def _raise_for_status(response: httpx.Response) -> None:
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise NotAllowed(read_message(response))
    if response.is_error:
        raise CommandError(read_message(response))
