"""Keys of objects. Each carries the ids of its tenant and of its row, so that objects without a row can be found."""

from __future__ import annotations

import secrets

FILES = "files/"
ADAPTERS = "adapters/"
KINDS = (FILES, ADAPTERS)


def file_key(tenant_id: str, file_id: str) -> str:
    """Return the key of a file's content."""
    return f"{FILES}{tenant_id}/{file_id}"


def new_adapter_key(tenant_id: str, adapter_id: str) -> str:
    """Return a new key for an adapter's tensors, so that of two publications neither replaces the other's object."""
    return f"{ADAPTERS}{tenant_id}/{adapter_id}/{secrets.token_hex(8)}"


def tenant_prefixes(tenant_id: str) -> list[str]:
    """Return the prefixes under which all objects of a tenant are."""
    return [f"{kind}{tenant_id}/" for kind in KINDS]
