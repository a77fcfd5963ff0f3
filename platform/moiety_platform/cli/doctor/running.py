"""Settings of the running gateway, for checks of services that its own environment configures.

`moiety serve` gives its gateway a trace store and a token of its own, which are in no file and no environment of the
operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from moiety_platform.settings import GatewaySettings

TIMEOUT_S = 5.0
OF_SERVICES = ("traces_endpoint", "oidc_issuer")


def read_running_settings(url: str, admin_key: str | None) -> Mapping[str, Any]:
    """Return the running gateway's settings of services, by name; empty if it does not tell them."""
    if admin_key is None:
        return {}
    headers = {"Authorization": f"Bearer {admin_key}"}
    try:
        answer = httpx.get(f"{url}/admin/v1/settings", headers=headers, timeout=TIMEOUT_S)
        rows = answer.json()["data"] if answer.status_code == httpx.codes.OK else []
        return {row["name"]: row["value"] for row in rows if row["name"] in OF_SERVICES and row["value"] is not None}
    except (httpx.HTTPError, ValueError, KeyError, TypeError):  # the checks of the gateway report that
        return {}


def with_running_issuer(settings: GatewaySettings, running: Mapping[str, Any]) -> GatewaySettings:
    """Return the settings with the running gateway's token issuer, if they have none."""
    if settings.oidc_issuer is None and "oidc_issuer" in running:
        return settings.model_copy(update={"oidc_issuer": running["oidc_issuer"]})
    return settings
