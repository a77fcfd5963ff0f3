"""Becomes a container: `python launch.py SPEC`, in the pod's network namespace and a mount namespace of its own.

A root of its own is laid over the machine's, read-only but for the volumes; then the user is changed, and the command
takes this process' place, so that signals reach it. Stands alone: it is run before the container's world is there.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

RDONLY, REMOUNT, BIND, REC, PRIVATE = 1, 32, 4096, 16384, 1 << 18
PARENT_DEATH_SIGNAL, NO_NEW_PRIVS = 1, 38  # of prctl
LIBC = ctypes.CDLL(None, use_errno=True)


def main(spec: dict[str, Any]) -> None:
    """Never returns."""
    mount("none", "/", None, REC | PRIVATE)
    base = Path(spec["folder"])
    mount("tmpfs", str(base), "tmpfs", 0)
    upper, work, root = (base / name for name in ("upper", "work", "root"))
    for folder in (upper, work, root):
        folder.mkdir()
    mount("overlay", str(root), "overlay", 0, f"lowerdir=/,upperdir={upper},workdir={work}")
    for folder in {part for one in spec["needed"] for part in (Path(one), *Path(one).parents)}:
        open_to_others(root, folder)
    for name in ("proc", "sys", "dev"):
        mount(f"/{name}", str(root / name), None, BIND | REC)
    for volume in spec["mounts"]:
        place(root, volume["source"], volume["path"], read_only=volume["read_only"])
    for folder in spec["needed"]:
        if any(Path(folder).is_relative_to(volume["path"]) for volume in spec["mounts"]):  # which would hide it
            place(root, folder, folder, read_only=True)
    place(root, spec["names"], "/run/names", read_only=True)
    (root / "etc/hosts").unlink(missing_ok=True)
    (root / "etc/hosts").symlink_to("/run/names/hosts")
    with (root / "etc/passwd").open("a", encoding="ascii") as users:
        users.write(f"container:x:{spec['user']}:{spec['group']}::/tmp:/usr/sbin/nologin\n")
    mount("none", str(root), None, REMOUNT | BIND | RDONLY)
    os.chroot(root)
    os.chdir("/")
    os.setgroups([])
    os.setresgid(*[spec["group"]] * 3)
    os.setresuid(*[spec["user"]] * 3)
    LIBC.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # nothing outlives whoever keeps the pods
    os.execvpe(spec["command"][0], spec["command"], spec["environment"])


def open_to_others(root: Path, folder: Path) -> None:
    """Let the container's user pass through a folder of the machine; only this view of it is changed. What is a mount
    of its own does not show through the root that lies below, and is put there."""
    inner = root / folder.relative_to("/")
    if folder != Path("/") and folder.is_mount():
        inner.mkdir(parents=True, exist_ok=True)
        mount(str(folder), str(inner), None, BIND | REC)
    elif inner.is_dir() and inner.stat().st_mode & 0o5 != 0o5:
        inner.chmod(inner.stat().st_mode | 0o55)


def place(root: Path, source: str, path: str, *, read_only: bool) -> None:
    target = within(root, path)
    target.mkdir(parents=True, exist_ok=True)
    mount(source, str(target), None, BIND)
    if read_only:
        mount("none", str(target), None, REMOUNT | BIND | RDONLY)


def within(root: Path, path: str) -> Path:
    """Where a path of the container lies on the machine, whose own links must not lead out of the container's root."""
    found = root
    for part in Path(path).parts[1:]:
        found /= part
        if found.is_symlink():
            link = found.readlink()
            found = within(root, str(link if link.is_absolute() else "/" / found.parent.relative_to(root) / link))
    return found


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    if LIBC.mount(*words, ctypes.c_ulong(flags), None if data is None else data.encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount {source}: {os.strerror(number)}", target)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
