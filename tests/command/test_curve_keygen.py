from __future__ import annotations

import stat
from pathlib import Path

import pytest
import zmq

from moiety_engine.server.gateway_keys import read_gateway_keys
from moiety_platform.cli.curve_keygen import curve_keygen
from moiety_platform.cli.errors import CommandError


def test_a_pair_of_keys_is_written_for_the_owner_alone_and_the_public_one_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gateway.key"
    curve_keygen(file)
    public, secret = capsys.readouterr().out.strip().encode(), file.read_bytes().strip()
    assert zmq.curve_public(secret) == public
    for one in (file, tmp_path / "gateway.key.pub"):
        assert stat.S_IMODE(one.stat().st_mode) == 0o600
    assert [one.public_key for one in read_gateway_keys(tmp_path / "gateway.key.pub").values()] == [public.decode()]


@pytest.mark.parametrize("present", ["own.key", "own.key.pub"])
def test_a_key_that_is_there_is_not_overwritten(tmp_path: Path, present: str) -> None:
    (tmp_path / present).write_text("old")
    with pytest.raises(CommandError, match="are not overwritten"):
        curve_keygen(tmp_path / "own.key")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [(present, "old")]


def test_a_directory_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot write"):
        curve_keygen(tmp_path / "missing" / "own.key")
