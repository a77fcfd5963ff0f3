"""Representations of settings contain no password of a URL."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from moiety_dashboard.settings import read_settings
from moiety_platform.settings import GatewaySettings
from moiety_platform.trace_receiver.settings import TraceSettings

PASSWORD = "hunter2"
URLS = [f"postgresql://moiety:{PASSWORD}@db.example:5432/m", f"postgresql://db.example/m?user=a&password={PASSWORD}"]


@pytest.mark.parametrize("url", URLS)
def test_settings_are_shown_without_the_passwords_of_their_urls(url: str) -> None:
    gateway = GatewaySettings(database_url=url, traces_database_url=url)
    traces = TraceSettings(database_url=url, traces_database_url=url, traces_token="t" * 16)
    for settings in (gateway, traces):
        for shown in (repr(settings), str(settings)):
            assert PASSWORD not in shown and "db.example" in shown
        assert settings.database_url == url


def test_a_refused_url_is_not_in_the_error() -> None:
    with pytest.raises(ValidationError) as refused:
        GatewaySettings(object_store_url=f"s3://key:{PASSWORD}@bucket/prefix")
    assert "object_store_url" in str(refused.value) and PASSWORD not in str(refused.value)


def test_the_dashboard_shows_no_password_of_the_gateways_url() -> None:
    settings = read_settings(["--gateway", f"http://someone:{PASSWORD}@gateway.example"])
    assert PASSWORD not in repr(settings) and PASSWORD in settings.gateway_url
