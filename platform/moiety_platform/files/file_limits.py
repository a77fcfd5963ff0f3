"""Limits of uploaded files: the size of a file, the size of all files of a tenant, and how long they are kept."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_platform.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits of uploads."""

    max_file_bytes: int
    max_tenant_bytes: int
    keep_s: int | None = None  # lifetime of a file without a requested expiry; None: until it is deleted

    @classmethod
    def of(cls, settings: GatewaySettings) -> FileLimits:
        return cls(settings.max_file_bytes, settings.max_file_bytes_per_tenant, settings.keep_files_s)
