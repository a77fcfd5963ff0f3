"""One settings model: flags over environment over file over defaults."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from moiety_platform.completions.limits import DEFAULT_SHAPE, ShapeLimits
from moiety_platform.config_file import ConfigFileError
from moiety_platform.settings import GatewaySettings

THEIRS = "openai+http://h:1/v1?model=m&kind=vllm&tokenizer=/m"


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "moiety.toml"
    path.write_text('[gateway]\nport = 9000\nhost = "0.0.0.0"\nengines = ["tcp://a:1"]\n[engine]\nother = 1\n')
    return path


def test_flags_win_over_the_environment_and_it_wins_over_the_file(toml, monkeypatch):
    monkeypatch.setenv("MOIETY_PORT", "9001")
    monkeypatch.setenv("MOIETY_ENGINES", "tcp://b:1, ipc:///run/c")
    loaded = GatewaySettings.load(toml, drain_s=5, port=None)
    assert (loaded.port, loaded.host, loaded.drain_s) == (9001, "0.0.0.0", 5)
    assert loaded.engines == ("tcp://b:1", "ipc:///run/c")
    assert GatewaySettings.load(toml, port=9002).port == 9002


def test_yaml_is_read_as_well(tmp_path):
    path = tmp_path / "moiety.yaml"
    path.write_text("gateway:\n  port: 9000\n  data_dir: /srv\n")
    loaded = GatewaySettings.load(path)
    assert (loaded.port, loaded.store_url) == (9000, "sqlite+aiosqlite:////srv/moiety.db")


def test_a_database_url_replaces_the_embedded_store():
    assert GatewaySettings(database_url="postgresql://db/x").store_url == "postgresql://db/x"


@pytest.mark.parametrize(
    ("text", "words"),
    [("port = 1", None), ("[gateway", "not valid TOML"), ("gateway = 7", "must be a table")],
)
def test_a_file_that_is_malformed_is_refused_with_its_name(tmp_path, text, words):
    path = tmp_path / "moiety.toml"
    path.write_text(text)
    if words is None:
        assert GatewaySettings.load(path).port == 8000  # another part's settings
    else:
        with pytest.raises(ConfigFileError, match=words):
            GatewaySettings.load(path)


def test_a_missing_file_is_refused_with_what_to_check():
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
def test_a_wrong_setting_is_refused_by_name(changes, words):
    with pytest.raises(ValidationError, match=words):
        GatewaySettings(**changes)


def test_a_password_in_an_address_is_refused_without_being_repeated():
    with pytest.raises(ValidationError) as caught:
        GatewaySettings(engines=THEIRS.replace("h:1", "me:word-of-mine@h:1"))
    (error,) = caught.value.errors()
    assert "key_file=PATH" in error["msg"]
    assert "word-of-mine" not in error["msg"]


def test_the_key_of_a_server_of_others_does_not_show_in_a_representation():
    assert "secret words" not in repr(GatewaySettings(foreign_api_key="secret words"))


def test_the_pepper_does_not_show_in_a_representation():
    assert "secret words" not in repr(GatewaySettings(key_pepper="secret words"))


def test_the_bounds_on_a_body_are_by_default_those_of_the_settings():
    assert ShapeLimits.of(GatewaySettings()) == DEFAULT_SHAPE
