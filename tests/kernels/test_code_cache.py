"""The cache of compiled kernels keeps the code of each signature when several processes save at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba import config

from moiety_kernels.cpu.code_cache import SharedCacheFile

WAIT_S = 0.5


def test_code_that_is_saved_at_the_same_time_is_found_by_its_own_signature(tmp_path: Path) -> None:
    both_have_read = threading.Barrier(2)

    def waiting_for_the_other(load: Callable[[], Any]) -> Callable[[], Any]:
        def load_index() -> Any:
            known = load()
            with contextlib.suppress(threading.BrokenBarrierError):  # the other one waits for the lock
                both_have_read.wait(WAIT_S)
            return known

        return load_index

    def save(key: str) -> None:
        file: Any = SharedCacheFile(str(tmp_path), "function", "stamp")
        file._load_index = waiting_for_the_other(file._load_index)
        file.save(key, (f"code of {key}",))

    savers = [threading.Thread(target=save, args=(key,)) for key in ("int64", "float64")]
    for one in savers:
        one.start()
    for one in savers:
        one.join()
    found = SharedCacheFile(str(tmp_path), "function", "stamp")
    assert {key: found.load(key) for key in ("int64", "float64")} == {
        "int64": ("code of int64",),
        "float64": ("code of float64",),
    }


def test_code_of_a_known_signature_is_replaced(tmp_path: Path) -> None:
    for number in range(2):
        SharedCacheFile(str(tmp_path), "function", "stamp").save("int64", (number,))
    assert SharedCacheFile(str(tmp_path), "function", "stamp").load("int64") == (1,)
    assert len(list(tmp_path.glob("*.nbc"))) == 1


def test_code_of_the_read_only_folder_is_used_and_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, written = tmp_path / "image", tmp_path / "written"
    for folder in (image, written):
        (folder / "moe").mkdir(parents=True)
    SharedCacheFile(str(image / "moe"), "function", "stamp").save("avx2", ("of the image",))
    before = sorted(image.rglob("*"))
    monkeypatch.setattr(config, "CACHE_DIR", str(written))
    monkeypatch.setattr(SharedCacheFile, "read_only", image)
    file = SharedCacheFile(str(written / "moe"), "function", "stamp")
    file.save("amx", ("of this machine",))
    assert [file.load(level) for level in ("avx2", "amx", "neon")] == [("of the image",), ("of this machine",), None]
    file.save("avx2", ("newer",))
    assert file.load("avx2") == ("newer",)
    assert sorted(image.rglob("*")) == before
    assert SharedCacheFile(str(tmp_path), "function", "stamp").load("avx2") is None


def test_addresses_of_objects_are_not_kept(tmp_path: Path) -> None:
    file = SharedCacheFile(str(tmp_path), "function", "stamp")
    file.save("int64", ("call of <function inner at 0x7f4c25216520>", b" at 0x7f"))
    assert file.load("int64") == ("call of <function inner>", b" at 0x7f")
