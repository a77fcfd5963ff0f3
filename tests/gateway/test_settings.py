"""One settings model: flags over environment over file over defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from moiety_platform.config_file import ConfigFileError
from moiety_platform.inference.shape_limits import DEFAULT_SHAPE, ShapeLimits
from moiety_platform.settings import GatewaySettings
from moiety_platform.trace_receiver.settings import TraceSettings

THEIRS = "openai+http://h:1/v1?model=m&kind=vllm&tokenizer=/m"


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "moiety.toml"
    path.write_text('[gateway]\nport = 9000\nhost = "0.0.0.0"\nengines = ["tcp://a:1"]\n[engine]\nother = 1\n')
    return path


def test_flags_win_over_the_environment_and_it_wins_over_the_file(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOIETY_PORT", "9001")
    monkeypatch.setenv("MOIETY_ENGINES", "tcp://b:1, ipc:///run/c")
    loaded = GatewaySettings.load(toml, drain_s=5, port=None)
    assert (loaded.port, loaded.host, loaded.drain_s) == (9001, "0.0.0.0", 5)
    assert loaded.engines == ("tcp://b:1", "ipc:///run/c")
    assert GatewaySettings.load(toml, port=9002).port == 9002


def test_yaml_is_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / "moiety.yaml"
    path.write_text("gateway:\n  port: 9000\n  data_dir: /srv\n")
    loaded = GatewaySettings.load(path)
    assert (loaded.port, loaded.store_url) == (9000, "sqlite+aiosqlite:////srv/moiety.db")


def test_a_database_url_replaces_the_embedded_store() -> None:
    assert GatewaySettings(database_url="postgresql://db/x").store_url == "postgresql://db/x"


@pytest.mark.parametrize(
    ("text", "words"),
    [("port = 1", None), ("[gateway", "not valid TOML"), ("gateway = 7", "must be a table")],
)
def test_a_file_that_is_malformed_is_refused_with_its_name(tmp_path: Path, text: str, words: str | None) -> None:
    path = tmp_path / "moiety.toml"
    path.write_text(text)
    if words is None:
        assert GatewaySettings.load(path).port == 8000  # another part's settings
    else:
        with pytest.raises(ConfigFileError, match=words):
            GatewaySettings.load(path)


def test_a_missing_file_is_refused_with_what_to_check() -> None:
    with pytest.raises(ConfigFileError, match="check the path given as --config"):
        GatewaySettings.load(Path("/nowhere/moiety.toml"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prot": 1}, "prot"),
        ({"port": 70_000}, "port"),
        ({"engines": "http://x"}, "must start with tcp://, ipc:// or dns"),
        ({"engines": "dns+tcp://engines"}, "NAME:PORT"),
        ({"engines": "dns+tcp://engines:99999"}, "NAME:PORT"),
        ({"engines": "tcp://a:1,tcp://a:1"}, "listed twice"),
        ({"engines": f"{THEIRS}&priority=on,{THEIRS}"}, "listed twice"),
        ({"engines": THEIRS.replace("&tokenizer=/m", "")}, "lacks tokenizer=…, the folder with the model's tokenizer"),
        ({"engines": THEIRS.replace("model=m&", "")}, "lacks model=…"),
        ({"engines": THEIRS.replace("vllm", "tgi")}, "kind must be one of vllm, sglang, llama.cpp, generic"),
        ({"engines": f"{THEIRS}&colour=red"}, "and nothing else"),
        ({"engines": f"{THEIRS}&context=many"}, "context must be a number"),
        ({"engines": f"{THEIRS}&priority=7"}, "priority must be on or off"),
        ({"engines": THEIRS.replace("/v1", "")}, "must have the form"),
        ({"engines": THEIRS.replace("h:1", "h:99999")}, "must have the form"),
        ({"curve_server_key": "k"}, "together"),
        ({"keep_requests_days": 30}, "at least 62 days"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        GatewaySettings(**changes)


def test_a_password_in_an_address_is_refused_without_being_repeated() -> None:
    with pytest.raises(ValidationError) as caught:
        GatewaySettings(engines=THEIRS.replace("h:1", "me:word-of-mine@h:1"))
    (error,) = caught.value.errors()
    assert "key_file=PATH" in error["msg"]
    assert "word-of-mine" not in error["msg"]


def test_the_key_of_a_server_of_others_does_not_show_in_a_representation() -> None:
    assert "secret words" not in repr(GatewaySettings(external_engine_api_key="secret words"))


def test_the_pepper_does_not_show_in_a_representation() -> None:
    assert "secret words" not in repr(GatewaySettings(key_pepper="secret words"))


def test_the_bounds_on_a_body_are_by_default_those_of_the_settings() -> None:
    assert ShapeLimits.of(GatewaySettings()) == DEFAULT_SHAPE


@pytest.mark.parametrize(
    ("store", "traces"),
    [
        ("sqlite:////var/lib/moiety/moiety.db", "sqlite:////var/lib/moiety/traces.db"),
        ("sqlite+aiosqlite:///moiety.db", "sqlite+aiosqlite:///traces.db"),
        ("postgresql://u:p@db/moiety", "postgresql://u:p@db/moiety"),
    ],
)
def test_traces_are_kept_beside_sqlite_and_in_postgresql_and_elsewhere_if_said_so(store: str, traces: str) -> None:
    assert GatewaySettings.load(database_url=store).traces_url == traces
    assert GatewaySettings.load(database_url=store, traces_database_url="sqlite:///t.db").traces_url == "sqlite:///t.db"


def test_the_trace_store_goes_by_the_gateways_database_of_the_same_file(tmp_path: Path) -> None:
    config = tmp_path / "moiety.toml"
    config.write_text(
        '[gateway]\nport = 1\ndatabase_url = "postgresql://db/moiety"\ntraces_token = "one for both of them"\n'
        "[traces]\nkeep_traces_days = 3\n"
    )
    settings = TraceSettings.load(config, traces_port=0)
    assert (settings.store_url, settings.keep_traces_days, settings.traces_port) == ("postgresql://db/moiety", 3, 0)
    assert "both" not in repr(settings)


def test_rates_of_classes_are_written_in_one_line_and_a_store_needs_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOIETY_TRACE_SAMPLE_RATES", "priority=1, batch=0.01")
    assert GatewaySettings.load().trace_sample_rates == {"priority": 1.0, "batch": 0.01}
    for wrong in ("priority=2", "priority", "priority=often"):
        monkeypatch.setenv("MOIETY_TRACE_SAMPLE_RATES", wrong)
        with pytest.raises(ValidationError):
            GatewaySettings.load()
    monkeypatch.delenv("MOIETY_TRACE_SAMPLE_RATES")
    with pytest.raises(ValidationError, match="traces_token"):
        GatewaySettings.load(traces_endpoint="http://127.0.0.1:4318/otlp")


def test_related_settings_can_come_from_the_file_and_the_environment(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a cluster, where the file is a ConfigMap and the environment has the secrets."""
    monkeypatch.setenv("MOIETY_TRACES_TOKEN", "t" * 32)
    with pytest.raises(ValidationError, match="traces_endpoint and traces_token together"):
        GatewaySettings.load(toml)
    toml.write_text('[gateway]\ntraces_endpoint = "http://traces:4318/otlp"\n')
    assert GatewaySettings.load(toml).traces_endpoint == "http://traces:4318/otlp"
