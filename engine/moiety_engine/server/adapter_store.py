"""Store of the adapters that gateways send, assembled from parts on this host's disk, where the core reads them."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import structlog

from moiety_engine.messages import CoreAdapter
from moiety_wire.messages import AdapterPart

log = structlog.get_logger()

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_ID = re.compile(r"[A-Za-z0-9_]{1,64}")  # also the folder's name


@dataclass(slots=True)
class _Upload:
    tenant_id: str
    folder: Path
    file: BinaryIO
    num_parts: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class AdapterStore:
    """Adapters from gateways, at most `max_bytes`, in a temporary folder that the store owns.

    The least recently used adapters are evicted, except those that open requests use. `given` are the operator's
    adapters, which lie elsewhere. Used by one thread.
    """

    max_bytes: int
    given: Container[str] = ()
    in_use: Callable[[], set[str]] = set
    _folder: Path | None = None
    _held: OrderedDict[str, int] = field(default_factory=OrderedDict)  # adapter → bytes, the least recently used first
    _user_of: dict[str, str] = field(default_factory=dict)  # adapter → tenant that used it last
    _erased: set[str] = field(default_factory=set)  # deleted tenants
    _uploads: dict[tuple[bytes, str], _Upload] = field(default_factory=dict)  # by sender and adapter
    _commands: list[CoreAdapter] = field(default_factory=list)

    def __contains__(self, name: object) -> bool:
        return name in self._held or (isinstance(name, str) and name in self.given)

    def used(self, name: str, tenant_id: str) -> None:
        """Note that a tenant's request uses the adapter."""
        if name in self._held:
            self._held.move_to_end(name)
            self._user_of[name] = tenant_id

    def forget(self, tenant_ids: Iterable[str]) -> None:
        """Delete the adapters that these tenants have used, at once or when no open request uses them any more.

        Uploads of these tenants are dropped and refused. The model evicts its copies in time; no other tenant can name
        them.
        """
        self._erased.update(tenant_ids)
        for key in [key for key, upload in self._uploads.items() if upload.tenant_id in self._erased]:
            self._drop(key)
        self._sweep()

    def _sweep(self) -> None:
        erased = [name for name, user in self._user_of.items() if user in self._erased]
        used = self.in_use() if erased else set()
        for name in erased:
            if name not in used:
                self._remove(name)

    def take(self, sender: bytes, part: AdapterPart) -> None:
        """Store the next part of an upload.

        The upload is dropped if the adapter is already held, a part comes out of order, or the part cannot be written.
        The request then fails because the adapter is missing.
        """
        key = sender, part.adapter_id
        if not _ID.fullmatch(part.adapter_id) or part.tenant_id in self._erased:
            return
        if part.adapter_id in self._held:
            self._drop(key)  # another upload was faster
            return
        try:
            self._add(key, part)
        except OSError as exc:
            self._drop(key)
            log.error(
                "adapter_not_saved", adapter=part.adapter_id, reason=str(exc), advice="check the free space on the disk"
            )

    def _add(self, key: tuple[bytes, str], part: AdapterPart) -> None:
        upload = self._begin(key, part) if part.index == 0 else self._uploads.get(key)
        if upload is None or upload.num_parts != part.index or not self._evict_for(len(part.data)):
            self._drop(key)
            log.warning(
                "adapter_part_dropped",
                adapter=part.adapter_id,
                index=part.index,
                max_bytes=self.max_bytes,
                advice="raise --adapter-disk-bytes if the adapters in use leave too little space",
            )
            return
        upload.file.write(part.data)
        upload.num_parts += 1
        upload.num_bytes += len(part.data)
        if part.is_last:
            self._finish(key)

    def take_commands(self) -> list[CoreAdapter]:
        """Return the commands for the core since the last call."""
        if self._erased:
            self._sweep()
        commands, self._commands = self._commands, []
        return commands

    def drop_uploads(self, sender: bytes) -> None:
        """Drop the uploads of a gateway that is gone."""
        for key in [key for key in self._uploads if key[0] == sender]:
            self._drop(key)

    def close(self) -> None:
        for key in list(self._uploads):
            self._drop(key)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self, key: tuple[bytes, str], part: AdapterPart) -> _Upload:
        self._drop(key)
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="moiety-adapters-"))
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        (folder / CONFIG).write_text(part.config, encoding="utf-8")
        upload = self._uploads[key] = _Upload(part.tenant_id, folder, (folder / TENSORS).open("wb"))
        return upload

    def _finish(self, key: tuple[bytes, str]) -> None:
        upload = self._uploads[key]
        upload.file.close()
        assert self._folder is not None
        place = self._folder / key[1]
        shutil.rmtree(place, ignore_errors=True)  # of an evicted adapter
        upload.folder.rename(place)
        del self._uploads[key]
        self._held[key[1]] = upload.num_bytes
        self._user_of[key[1]] = upload.tenant_id
        self._commands.append(CoreAdapter(key[1], str(place)))
        log.info("adapter_received", adapter=key[1], num_bytes=upload.num_bytes)

    def _drop(self, key: tuple[bytes, str]) -> None:
        upload = self._uploads.pop(key, None)
        if upload is not None:
            with contextlib.suppress(OSError):  # closing flushes the buffer
                upload.file.close()
            shutil.rmtree(upload.folder, ignore_errors=True)

    def _remove(self, name: str) -> None:
        del self._held[name]
        self._user_of.pop(name, None)
        assert self._folder is not None
        shutil.rmtree(self._folder / name, ignore_errors=True)

    def _evict_for(self, num_bytes: int) -> bool:
        """Evict adapters until so many bytes fit beside the held adapters and the uploads.

        Returns False if adapters in use leave too little space.
        """
        num_bytes += sum(upload.num_bytes for upload in self._uploads.values())
        if sum(self._held.values()) + num_bytes <= self.max_bytes:
            return True
        used = self.in_use()
        for name in [name for name in self._held if name not in used]:
            self._remove(name)
            if sum(self._held.values()) + num_bytes <= self.max_bytes:
                return True
        return False
