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
    adapters = AdapterStore(100)

    def full(*_args: object, **_more: object) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "mkdtemp", full)
        adapters.take(b"g", part("ada_a", 0, last=True))
    assert "ada_a" not in adapters
    adapters.take(b"g", part("ada_a", 0, last=True))
    assert "ada_a" in adapters
    adapters.close()


def test_concurrent_uploads_share_one_size_limit() -> None:
    adapters = AdapterStore(40)
    for index in range(2):
        for sender, name in ((b"g", "ada_a"), (b"h", "ada_b")):
            adapters.take(sender, part(name, index))
    adapters.take(b"g", part("ada_a", 2, last=True))  # the fifth of ten bytes
    assert "ada_a" not in adapters
    adapters.take(b"h", part("ada_b", 2, last=True))
    assert "ada_b" in adapters
    adapters.close()


def test_an_upload_that_another_gateway_finished_first_leaves_no_files() -> None:
    adapters = AdapterStore(100)
    adapters.take(b"g", part("ada_a", 0))
    adapters.take(b"h", part("ada_a", 0, last=True))
    adapters.take(b"g", part("ada_a", 1))
    assert "ada_a" in adapters and not adapters._uploads
    adapters.close()


def test_only_adapters_of_a_deleted_tenant_are_removed_from_disk() -> None:
    adapters = AdapterStore(100)
    for name, tenant_id in (("ada_a", "gone"), ("ada_b", "stays")):
        adapters.take(b"g", part(name, 0, last=True))
        adapters.used(name, tenant_id)
    folders = {command.name: Path(command.folder) for command in adapters.take_commands()}
    adapters.forget(["gone", "never there"])
    assert ("ada_a" in adapters, "ada_b" in adapters) == (False, True)
    assert (folders["ada_a"].exists(), folders["ada_b"].exists()) == (False, True)
    adapters.close()


def test_adapters_of_a_deleted_tenant_stay_until_its_requests_end() -> None:
    open_requests = {"ada_a"}
    adapters = AdapterStore(100, in_use=lambda: open_requests)
    adapters.take(b"g", part("ada_a", 0, last=True, tenant_id="gone"))
    (command,) = adapters.take_commands()
    adapters.forget(["gone"])
    assert Path(command.folder).exists()
    open_requests.clear()
    adapters.take_commands()
    assert not Path(command.folder).exists()
    adapters.close()


def test_nothing_of_a_forgotten_tenant_is_taken_that_was_on_its_way_or_that_no_request_has_named() -> None:
    adapters = AdapterStore(100)
    adapters.take(b"g", part("ada_a", 0, last=True, tenant_id="gone"))
    adapters.take(b"g", part("ada_b", 0, tenant_id="gone"))
    adapters.take(b"h", part("ada_c", 0, tenant_id="stays"))
    adapters.forget(["gone"])
    for sender, name, tenant_id in ((b"g", "ada_b", "gone"), (b"h", "ada_c", "stays"), (b"g", "ada_d", "gone")):
        adapters.take(sender, part(name, 1 if name != "ada_d" else 0, last=True, tenant_id=tenant_id))
    assert [name in adapters for name in ("ada_a", "ada_b", "ada_c", "ada_d")] == [False, False, True, False]
    adapters.close()
