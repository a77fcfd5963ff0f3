"""No representation of settings, error, finding or log line contains the password of a URL."""

from __future__ import annotations

import io
import logging
from typing import Literal

import httpx
import pytest
import structlog
from pydantic import ValidationError

from moiety_dashboard.client import AdminClient, GatewayUnreachable
from moiety_dashboard.settings import read_settings, without_password
from moiety_platform.cli.doctor.finding import fail
from moiety_platform.engine_addresses import identity
from moiety_platform.logs import configure_logging
from moiety_platform.reloading.shown import SET, shown
from moiety_platform.settings import GatewaySettings
from moiety_platform.trace_receiver.settings import TraceSettings

PASSWORD = "hunter2"
ODD_PASSWORDS = [
    f"a/{PASSWORD}",
    f"{PASSWORD}/a",
    f"a@{PASSWORD}",
    f"a:{PASSWORD}",
    f"a?{PASSWORD}#a",
    f"/{PASSWORD}/a/@b",
]
URLS = [
    f"postgresql://moiety:{PASSWORD}@db.example:5432/m",
    f"postgresql://db.example/m?user=a&password={PASSWORD}",
    *(f"postgresql://moiety:{password}@db.example:5432/m" for password in ODD_PASSWORDS),
]


@pytest.mark.parametrize("url", URLS)
def test_settings_are_shown_without_the_passwords_of_their_urls(url: str) -> None:
    gateway = GatewaySettings(database_url=url, traces_database_url=url)
    traces = TraceSettings(database_url=url, traces_database_url=url, traces_token="t" * 16)
    for settings in (gateway, traces):
        for text in (repr(settings), str(settings)):
            assert PASSWORD not in text and "db.example" in text
        assert settings.database_url == url


@pytest.mark.parametrize("password", [PASSWORD, *ODD_PASSWORDS])
@pytest.mark.parametrize("scheme", ["s3", "file", "ftp"])
def test_a_refused_url_is_not_in_the_error(scheme: str, password: str) -> None:
    with pytest.raises(ValidationError) as refused:
        GatewaySettings(object_store_url=f"{scheme}://key:{password}@bucket/prefix")
    assert "object_store_url" in str(refused.value) and PASSWORD not in str(refused.value)


@pytest.mark.parametrize("password", [PASSWORD, *ODD_PASSWORDS])
@pytest.mark.parametrize(
    "address",
    [
        "tcp://a:{}@engine:7000",
        "dns+tcp://a:{}@engine:7000",
        "openai+http://a:{}@engine/v1?model=m",
        "http://a:{}@engine/v1",
    ],
)
def test_an_engine_address_with_a_password_is_refused_without_it(address: str, password: str) -> None:
    with pytest.raises(ValueError, match="engine address") as refused:
        identity(address.format(password))
    assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize("name", ["api_key", "token", "password"])
def test_a_key_in_an_engine_address_is_not_in_the_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*key_file") as refused:
        identity(f"openai+http://engine/v1?model=m&{name}={PASSWORD}")
    assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize("url", [URLS[0], *URLS[2:]])
@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_log_line_contains_no_password(log_format: Literal["json", "console"], url: str) -> None:
    stream = io.StringIO()
    try:
        configure_logging("info", log_format, stream)
        structlog.get_logger().warning("store_unreachable", reason=f"no connection to {url!r}", places=[url])
        logging.getLogger("a.library").warning("cannot reach %s", url)
    finally:
        structlog.reset_defaults()
        logging.getLogger().handlers[:] = []
    assert stream.getvalue().count("db.example") == 3 and PASSWORD not in stream.getvalue()


@pytest.mark.parametrize("url", [URLS[0], *URLS[2:]])
def test_findings_of_the_doctor_contain_no_password(url: str) -> None:
    finding = fail("database", "away", f"{url} does not answer", f"correct {url}", f"psql {url}")
    assert PASSWORD not in str(finding.as_json()) and "db.example" in finding.found


@pytest.mark.parametrize("password", [PASSWORD, *ODD_PASSWORDS])
def test_live_settings_contain_no_password(password: str) -> None:
    assert shown([f"http://a:{password}@traces.example/v1"]) == [f"http://a:{SET}@traces.example/v1"]


def test_the_dashboard_shows_no_password_of_the_gateways_url() -> None:
    settings = read_settings(["--gateway", f"http://someone:{PASSWORD}@gateway.example"])
    assert PASSWORD not in repr(settings) and PASSWORD in settings.gateway_url
    for password in (PASSWORD, *ODD_PASSWORDS):
        url = f"http://someone:{password}@gateway.example/a"
        assert without_password(url) == "http://someone:…@gateway.example/a"
    client = AdminClient(settings.gateway_url, "key", httpx.Client(transport=httpx.MockTransport(lambda _: _lost())))
    with pytest.raises(GatewayUnreachable) as away:
        client.get("/tenants")
    assert PASSWORD not in str(away.value) and "gateway.example" in str(away.value)


def _lost() -> httpx.Response:
    raise httpx.ConnectError("away")
