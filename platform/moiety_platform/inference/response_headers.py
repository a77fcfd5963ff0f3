"""Response headers of inference requests: served class, admission, quotas, and ignored or adjusted request fields."""

from __future__ import annotations

from moiety_platform.inference.request_record import RequestRecord

CLASS_HEADER = "x-moiety-class"  # the class that is served
ADMISSION_HEADER = "x-moiety-admission"  # the reason code of the engine's verdict
IGNORED_HEADER = "x-moiety-ignored-fields"
ADJUSTED_HEADER = "x-moiety-adjusted-fields"
_MAX_NAMED = 32  # in a header


def response_headers(record: RequestRecord) -> dict[str, str]:
    """Return the response headers of an admitted request."""
    adjustments = {}
    if record.ignored_fields or record.adjusted_fields:
        adjustments = field_headers(record.ignored_fields, record.adjusted_fields)
    return {
        CLASS_HEADER: record.service_class,
        ADMISSION_HEADER: record.admission_reason,
        **record.reservation.headers(),
        **adjustments,
    }


def field_headers(ignored_names: list[str], adjusted: dict[str, str]) -> dict[str, str]:
    """Return the headers that name ignored fields, and adjusted fields with the value that is used instead."""
    headers = {}
    if ignored_names:
        headers[IGNORED_HEADER] = ", ".join(sorted(ignored_names)[:_MAX_NAMED])
    if adjusted:
        headers[ADJUSTED_HEADER] = ", ".join(f"{name}={value}" for name, value in sorted(adjusted.items())[:_MAX_NAMED])
    return headers
