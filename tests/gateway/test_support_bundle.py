"""`moiety support-bundle`: what helps is in it, and none of the secrets that were planted everywhere."""

from __future__ import annotations

import asyncio
import json
import tarfile
from pathlib import Path

import pytest

from moiety_migrations import upgrade
from moiety_platform.cli.gateway import ensure_first_keys
from moiety_platform.cli.main import main
from moiety_platform.redaction import redact_text
from moiety_platform.settings import GatewaySettings

from .conftest import RunningGateway

PLANTED = {
    "MOIETY_EXTERNAL_ENGINE_API_KEY": "external-planted-1",
    "MOIETY_TRACES_TOKEN": "traces-planted-22",
    "MOIETY_TRACES_ENDPOINT": "http://user:endpoint-planted-3@127.0.0.1:1/otlp",
}


async def test_a_bundle_has_what_helps_and_no_secret(
    gateway: RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    upgrade(f"sqlite:///{data_dir / 'moiety.db'}")
    first = await ensure_first_keys(GatewaySettings(data_dir=data_dir), reissue=False)
    pepper = (data_dir / "pepper").read_text().strip()
    log = tmp_path / "gateway.log"
    said = (
        f"used {gateway.key} and {first.admin_key}\npepper={pepper}\nAuthorization: Bearer bearer-planted-4\n"
        'postgresql://me:word-planted-5@db/x\n{"password": "json-planted-6", "max_tokens": 77}\n'
        "traces-planted-22 by itself\n"
    )
    log.write_text(said)
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    target = tmp_path / "bundle.tar.gz"
    options = ("--data-dir", data_dir, "--url", gateway.url, "--admin-key", gateway.admin_key, "--log", log)

    def run() -> None:
        with pytest.raises(SystemExit) as ended:
            main(["support-bundle", "-o", str(target), *map(str, options)])
        assert ended.value.code == 0, capsys.readouterr()

    await asyncio.to_thread(run)
    with tarfile.open(target) as bundle:
        parts = {one.name.removeprefix("moiety-support/"): bundle.extractfile(one).read().decode() for one in bundle}
    secrets = [gateway.key, gateway.admin_key, first.admin_key, first.tenant_key, pepper]
    for name, text in parts.items():
        assert [one for one in (*secrets, *(key.partition(".")[2] for key in secrets[:4])) if one in text] == [], name
        assert "planted" not in text, name
    assert '"tiny"' in parts["engines.json"]
    assert json.loads(parts["settings.json"])["credit_window_tokens"] == 128
    assert {one["code"] for one in json.loads(parts["doctor.json"])} >= {"versions", "revision", "no_engines"}
    assert "moiety_" in parts["metrics.txt"]
    assert '"max_tokens": 77' in parts["logs/gateway.log"]
    assert target.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "line",
    ["api_key=hidden-word", "X-Api-Key: hidden-word", "token: 'hidden-word'", "curve_secret_key = hidden-word",
     "https://a:hidden-word@h/", "https://a:b/hidden-word@h/", "https://:p@hidden-word?c@h",
     "bearer hidden-word", "sk-hidden-word", "-----BEGIN PRIVATE KEY-----\nhidden-word",
     "Incorrect API key provided: hidden-word"],
)  # fmt: skip
def test_support_bundle_redacts_values_that_look_like_secrets(line: str) -> None:
    assert "hidden-word" not in redact_text(f"before {line} after", ())


@pytest.mark.parametrize(
    "line",
    [
        "output_tokens=12",
        '"prompt_tokens": 7',
        "key_id k1 refused",
        "max_tokens: 9",
        "tcp://a:1 or x@y",
        "tcp://a:1,http://b/c@d",
    ],
)
def test_support_bundle_keeps_lines_without_secrets(line: str) -> None:
    assert redact_text(line, ("short",)) == line
