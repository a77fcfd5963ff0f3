"""The settings that a serve passes to its processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moiety_platform import gpu_driver
from moiety_platform.cli.serve import runs_on_cpu
from moiety_platform.supervisor.data_dir import DataDir, FirstKeys
from moiety_platform.supervisor.plan import (
    ServeOptions,
    announcement,
    dashboard_process,
    gateway_process,
    traces_process,
)
from moiety_wire.engine_choices import DeviceChoice

from .conftest import Ended

KEYS = FirstKeys(admin_key="mty_admin.secret", tenant="demo", tenant_key="mty_tenant.secret")


def options(host: str) -> ServeOptions:
    return ServeOptions(host=host, port=8000, dashboard_port=8501, model=None, name="m", drain_s=1)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "server.example"])
def test_the_dashboard_has_no_key_and_whoever_opens_it_shows_one(host: str) -> None:
    assert dashboard_process(options(host)).environment == {"MOIETY_ADMIN_KEY": ""}
    assert "sign in with the admin key" in announcement(options(host), KEYS, new_keys=False)


def test_gateway_and_trace_store_share_a_token_that_is_on_no_command_line(tmp_path: Path) -> None:
    given = replace(options("0.0.0.0"), traces_port=4318, traces_token="a secret token")
    data_dir = DataDir(tmp_path)
    gateway, traces = gateway_process(given, data_dir, tmp_path / "socket"), traces_process(given, data_dir)
    assert gateway.environment["MOIETY_TRACES_ENDPOINT"] == "http://127.0.0.1:4318/otlp"
    for part in (gateway, traces):
        assert part.environment["MOIETY_TRACES_TOKEN"] == "a secret token"
        assert "secret" not in f"{part} {given}"
    without = gateway_process(options("127.0.0.1"), data_dir, tmp_path / "socket").environment
    assert set(without) == {"MOIETY_SUPERVISOR_STATUS"}


@pytest.mark.parametrize(
    "device, drivers, expected",
    [("cpu", True, True), ("cuda", False, False), ("auto", False, True), ("auto", True, False)],
)
def test_the_first_start_on_a_cpu_gives_classes_longer_slos(
    device: str, drivers: bool, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "driver"
    if drivers:
        driver.touch()
    for name in ("NVIDIA_DRIVER", "AMD_DRIVER"):
        monkeypatch.setattr(gpu_driver, name, driver)
    given = replace(options("127.0.0.1"), cpu_slos=runs_on_cpu(DeviceChoice(device)))
    arguments = gateway_process(given, DataDir(tmp_path), tmp_path / "socket").arguments
    assert ("--cpu-slos" in arguments) is expected


def test_slos_of_a_first_start_need_its_keys(called: Callable[..., Ended]) -> None:
    refused = called("gateway", "--cpu-slos")
    assert refused.returncode == 2
    assert "give --first-keys" in refused.stderr
