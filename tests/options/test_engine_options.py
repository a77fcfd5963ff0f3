"""Options of an engine agree with its configuration, which programs make without a command."""

from __future__ import annotations

from pathlib import Path

from moiety_engine.config import EngineConfig, TransferConfig
from moiety_engine.option_values import serving_config
from moiety_engine.server.settings import ServerSettings
from moiety_options.engine_options import EngineOptions


def test_options_that_are_not_given_make_the_configuration_of_a_program_that_sets_nothing() -> None:
    made = serving_config(EngineOptions(), Path("/models/m"), "m", {})
    assert made == EngineConfig(model="/models/m", name="m")


def test_the_server_has_the_same_defaults_as_its_options() -> None:
    options, settings = EngineOptions(), ServerSettings("m")
    for name in ("listen", "core_silence_s", "adapter_disk_bytes", "role"):
        assert getattr(options, name) == getattr(settings, name)
    assert options.drain_s == settings.drain_timeout_s


def test_each_option_reaches_the_field_of_its_name() -> None:
    given = EngineOptions(
        max_running=3,
        kv_memory_bytes=5 << 20,
        threads=2,
        disk_cache=Path("/d"),
        kv_listen="tcp://a:1",
        sleep_folder=Path("/s"),
    )
    made = serving_config(given, Path("/models/m"), "m", {})
    assert (made.max_running, made.kv_memory_bytes, made.num_threads, made.disk_cache) == (3, 5 << 20, 2, "/d")
    assert made.sleep_folder == "/s"
    assert made.transfer == TransferConfig(listen="tcp://a:1")
