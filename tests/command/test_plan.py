"""What a serve gives to its parts."""

from __future__ import annotations

import pytest

from moiety_platform.supervisor.data_dir import FirstKeys
from moiety_platform.supervisor.plan import ServeOptions, announcement, dashboard_part

KEYS = FirstKeys(admin_key="mty_admin.secret", tenant="demo", tenant_key="mty_tenant.secret")


def options(host: str) -> ServeOptions:
    return ServeOptions(host=host, port=8000, dashboard_port=8501, model=None, name="m", drain_s=1)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "[::1]"])
def test_the_dashboard_of_this_machine_alone_has_the_admin_key(host: str) -> None:
    assert dashboard_part(options(host), KEYS).environment["MOIETY_ADMIN_KEY"] == KEYS.admin_key


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.5", "server.example"])
def test_a_dashboard_that_others_can_open_asks_for_the_admin_key(host: str) -> None:
    assert dashboard_part(options(host), KEYS).environment == {"MOIETY_ADMIN_KEY": ""}
    assert "asks for the admin key" in announcement(options(host), KEYS, new_keys=False)
