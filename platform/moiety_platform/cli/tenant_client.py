"""Client of the tenants' API for the commands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from moiety_platform.cli.gateway_client import DefaultKey, GatewayClient, call, raise_for_status, reaching


@dataclass(frozen=True, slots=True)
class TenantClient(GatewayClient):
    """Client of one gateway with one tenant's key."""

    default_key = DefaultKey(lambda keys: keys.tenant_key, "no tenant's key: give --key or MOIETY_KEY")
    timeout_s = 60.0

    def __enter__(self) -> TenantClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        """Call the API and return the decoded response. Raises NotReachable, NotAllowed or CommandError."""
        answer: dict[str, Any] = call(self.http, method, f"/v1{path}", **request)
        return answer

    def upload(self, name: str, content: BinaryIO) -> dict[str, Any]:
        """Upload a file for a batch. Raises the same errors as `call`."""
        return self.call("POST", "/files", data={"purpose": "batch"}, files={"file": (name, content)})

    def download(self, file_id: str) -> Iterator[bytes]:
        """Yield a file's content, piece by piece. Raises the same errors as `call`."""
        with reaching(self.http), self.http.stream("GET", f"/v1/files/{file_id}/content") as response:
            if response.is_error:
                response.read()
            raise_for_status(response)
            yield from response.iter_bytes()
