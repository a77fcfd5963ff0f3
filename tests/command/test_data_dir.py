"""The data directory: private, locked, and never without the secret that its keys depend on."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from moiety_platform.supervisor.data_dir import DataDir, FirstKeys, read_first_keys, write_first_keys
from moiety_platform.supervisor.errors import DataDirInUse, SupervisorError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_directory_and_its_folders_are_the_owners_alone(tmp_path: Path) -> None:
    with DataDir(tmp_path / "deep" / "data") as opened:
        assert {mode(path) for path in (opened.path, opened.path / "logs", opened.path / "run")} == {0o700}


def test_a_second_serve_on_the_directory_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with DataDir(tmp_path), pytest.raises(DataDirInUse, match=r"process \d+.*--data-dir"), DataDir(tmp_path):
        pass


def test_the_directory_is_free_again_after_use(tmp_path: Path) -> None:
    for _ in range(2):
        with DataDir(tmp_path) as opened:
            assert opened.path == tmp_path


def test_a_directory_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SupervisorError, match="--data-dir"), DataDir(tmp_path / "file" / "data"):
        pass


def test_a_database_without_its_pepper_is_refused(tmp_path: Path) -> None:
    with DataDir(tmp_path) as opened:
        opened.check_pepper()  # a first start has neither
        opened.database_path.touch()
        with pytest.raises(SupervisorError, match="restore"):
            opened.check_pepper()
        opened.pepper_path.write_text("p" * 64)
        opened.check_pepper()
        opened.pepper_path.rename(tmp_path / "pepper.previous")  # it is being replaced
        opened.check_pepper()


def test_the_first_keys_come_back_from_a_private_file(tmp_path: Path) -> None:
    keys = FirstKeys(admin_key="mty_a.b", tenant="demo", tenant_key="mty_c.d")
    path = tmp_path / "keys.json"
    assert read_first_keys(tmp_path) is None
    write_first_keys(path, keys)
    assert read_first_keys(tmp_path) == keys
    assert mode(path) == 0o600
    assert "mty_" not in repr(keys)


def test_a_damaged_file_of_keys_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text('{"admin_key": ')
    with pytest.raises(SupervisorError, match=r"keys\.json is damaged"):
        read_first_keys(tmp_path)


def test_a_long_path_gets_its_socket_elsewhere(tmp_path: Path) -> None:
    with DataDir(tmp_path / ("d" * 100)) as opened:
        socket = opened.engine_socket()
        assert len(str(socket)) < 90
        assert mode(socket.parent) == 0o700
        socket.parent.rmdir()


def test_files_of_an_earlier_version_are_found_under_their_names(tmp_path: Path) -> None:
    """A file that is renamed loses its contents at an upgrade: keys, tenants, or usage that is not stored yet."""
    data_dir = DataDir(tmp_path)
    paths = data_dir.database_path, data_dir.pepper_path, data_dir.keys_path, data_dir.unacknowledged_usage_path
    assert [path.name for path in paths] == ["moiety.db", "pepper", "keys.json", "unsettled-usage"]
    assert all(path.parent == tmp_path for path in paths)
