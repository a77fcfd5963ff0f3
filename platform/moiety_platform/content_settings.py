"""Settings of the logging of contents of requests."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import field_validator

from moiety_platform.process_settings import ProcessSettings
from moiety_platform.reloadable import live


class ContentSettings(ProcessSettings):
    """Redaction of contents of requests, of tenants that opted in to their logging."""

    content_redaction_url: str | None = live(
        None,
        "URL of an endpoint that redacts contents of requests before they are stored, after the built-in redaction. "
        "A content is not stored if the endpoint fails. Private networks must be in webhook_networks.",
    )
    content_redaction_timeout_ms: int = live(
        2000, "Time in which that endpoint must answer, in milliseconds.", ge=10, le=30_000
    )

    @field_validator("content_redaction_url")
    @classmethod
    def _check_redaction_url(cls, value: str | None) -> str | None:
        if value is not None and not (urlsplit(value).hostname and urlsplit(value).scheme in ("http", "https")):
            raise ValueError(
                "must be a URL such as https://redaction.example.com/redact"
            )  # not the value: its password
        return value
