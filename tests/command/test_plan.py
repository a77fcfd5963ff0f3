"""What a serve gives to its parts."""

from __future__ import annotations

import pytest

from moiety_platform.supervisor.data_dir import FirstKeys
from moiety_platform.supervisor.plan import ServeOptions, announcement, dashboard_part

KEYS = FirstKeys(admin_key="mty_admin.secret", tenant="demo", tenant_key="mty_tenant.secret")


def options(host: str) -> ServeOptions:
    return ServeOptions(host=host, port=8000, dashboard_port=8501, model=None, name="m", drain_s=1)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "server.example"])
def test_the_dashboard_has_no_key_and_whoever_opens_it_shows_one(host: str) -> None:
    assert dashboard_part(options(host)).environment == {"MOIETY_ADMIN_KEY": ""}
    assert "sign in with the admin key" in announcement(options(host), KEYS, new_keys=False)
