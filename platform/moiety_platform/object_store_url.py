"""URLs of the object store. Pure."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from moiety_platform.redaction import hide_url_passwords

SCHEMES = ("file", "s3", "gs", "az")


def check_url(url: str) -> str:
    """Return the URL. Raises ValueError, which says what is wrong."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"{redacted(url)!r} must begin with file://, s3://, gs:// or az://")
    has_credentials = parts.username is not None or ":" in parts.netloc or hide_url_passwords(url) != url
    if has_credentials or parts.query or parts.fragment:
        raise ValueError(
            "the URL must hold no credentials and no options; set those in the environment, such as AWS_ACCESS_KEY_ID"
        )
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise ValueError(f"{url!r} must name an absolute folder, such as file:///var/lib/moiety/objects")
    elif not parts.netloc:
        raise ValueError(f"{url!r} must name a bucket, such as {parts.scheme}://bucket/prefix")
    return url


def local_folder(url: str) -> Path | None:
    """Return the folder of a file:// URL; None for a bucket."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def redacted(url: str) -> str:
    """Return the URL without credentials and query."""
    parts = urlsplit(hide_url_passwords(url, "***"))
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
