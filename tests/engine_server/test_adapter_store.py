"""The engine's store of adapters that gateways send, on a disk with a limit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from moiety_engine.server.adapter_store import AdapterStore
from moiety_wire.messages import AdapterPart


def part(name: str, index: int, *, last: bool = False, tenant_id: str = "") -> AdapterPart:
    return AdapterPart(name, index, b"x" * 10, "" if index else "{}", last, tenant_id)


def test_a_full_disk_costs_the_adapter_and_no_other_message(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = AdapterStore(100)

    def full(*_args: object, **_more: object) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "mkdtemp", full)
        shelf.take(b"g", part("ada_a", 0, last=True))
    assert "ada_a" not in shelf
    shelf.take(b"g", part("ada_a", 0, last=True))
    assert "ada_a" in shelf
    shelf.close()


def test_concurrent_uploads_share_one_size_limit() -> None:
    shelf = AdapterStore(40)
    for index in range(2):
        for sender, name in ((b"g", "ada_a"), (b"h", "ada_b")):
            shelf.take(sender, part(name, index))
    shelf.take(b"g", part("ada_a", 2, last=True))  # the fifth of ten bytes
    assert "ada_a" not in shelf
    shelf.take(b"h", part("ada_b", 2, last=True))
    assert "ada_b" in shelf
    shelf.close()


def test_an_upload_that_another_gateway_finished_first_leaves_no_files() -> None:
    shelf = AdapterStore(100)
    shelf.take(b"g", part("ada_a", 0))
    shelf.take(b"h", part("ada_a", 0, last=True))
    shelf.take(b"g", part("ada_a", 1))
    assert "ada_a" in shelf and not shelf._uploads
    shelf.close()


def test_only_adapters_of_a_deleted_tenant_are_removed_from_disk() -> None:
    shelf = AdapterStore(100)
    for name, tenant_id in (("ada_a", "gone"), ("ada_b", "stays")):
        shelf.take(b"g", part(name, 0, last=True))
        shelf.used(name, tenant_id)
    folders = {command.name: Path(command.folder) for command in shelf.take_commands()}
    shelf.forget(["gone", "never there"])
    assert ("ada_a" in shelf, "ada_b" in shelf) == (False, True)
    assert (folders["ada_a"].exists(), folders["ada_b"].exists()) == (False, True)
    shelf.close()


def test_adapters_of_a_deleted_tenant_stay_until_its_requests_end() -> None:
    open_requests = {"ada_a"}
    shelf = AdapterStore(100, in_use=lambda: open_requests)
    shelf.take(b"g", part("ada_a", 0, last=True, tenant_id="gone"))
    (command,) = shelf.take_commands()
    shelf.forget(["gone"])
    assert Path(command.folder).exists()
    open_requests.clear()
    shelf.take_commands()
    assert not Path(command.folder).exists()
    shelf.close()


def test_nothing_of_a_forgotten_tenant_is_taken_that_was_on_its_way_or_that_no_request_has_named() -> None:
    shelf = AdapterStore(100)
    shelf.take(b"g", part("ada_a", 0, last=True, tenant_id="gone"))
    shelf.take(b"g", part("ada_b", 0, tenant_id="gone"))
    shelf.take(b"h", part("ada_c", 0, tenant_id="stays"))
    shelf.forget(["gone"])
    for sender, name, tenant_id in ((b"g", "ada_b", "gone"), (b"h", "ada_c", "stays"), (b"g", "ada_d", "gone")):
        shelf.take(sender, part(name, 1 if name != "ada_d" else 0, last=True, tenant_id=tenant_id))
    assert [name in shelf for name in ("ada_a", "ada_b", "ada_c", "ada_d")] == [False, False, True, False]
    shelf.close()
