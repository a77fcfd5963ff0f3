"""Container launcher: `python launch.py SPEC`, in the pod's network namespace and its own mount namespace.

It overlays the machine's root with a separate one, read-only except for the volumes; then it changes the user and
executes the command in this process, so that signals reach the command. It imports no other module of the package,
since it runs before the container's file system exists.
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
PARENT_DEATH_SIGNAL, NO_NEW_PRIVS = 1, 38  # constants of prctl
LIBC = ctypes.CDLL(None, use_errno=True)


def main(spec: dict[str, Any]) -> None:
    """Replace this process by the container's command; it never returns."""
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
    hidden = keep_hidden(base, root, spec)
    for volume in spec["mounts"]:
        place(root, volume["source"], volume["path"], read_only=volume["read_only"])
    for path, kept in hidden.items():
        place(root, str(kept), path, read_only=True)
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
    LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # no container outlives the process that keeps the pods
    os.execvpe(spec["command"][0], spec["command"], spec["environment"])


def open_to_others(root: Path, folder: Path) -> None:
    """Let the container's user traverse a folder of the machine; only this container's view of it changes.

    A separate mount is not visible through the overlay's lower root, so it is bound there.
    """
    inner = root / folder.relative_to("/")
    if folder != Path("/") and folder.is_mount():
        inner.mkdir(parents=True, exist_ok=True)
        mount(str(folder), str(inner), None, BIND | REC)
    elif inner.is_dir() and inner.stat().st_mode & 0o5 != 0o5:
        inner.chmod(inner.stat().st_mode | 0o55)


def keep_hidden(base: Path, root: Path, spec: dict[str, Any]) -> dict[str, Path]:
    """Bind the needed folders that a volume will hide elsewhere, as the container's user may read them."""
    kept: dict[str, Path] = {}
    for folder in spec["needed"]:
        if any(Path(folder).is_relative_to(volume["path"]) for volume in spec["mounts"]):
            kept[folder] = base / f"kept-{len(kept)}"
            kept[folder].mkdir()
            mount(str(root / Path(folder).relative_to("/")), str(kept[folder]), None, BIND | REC)
    return kept


def place(root: Path, source: str, path: str, *, read_only: bool) -> None:
    target = within(root, path)
    target.mkdir(parents=True, exist_ok=True)
    mount(source, str(target), None, BIND)
    if read_only:
        mount("none", str(target), None, REMOUNT | BIND | RDONLY)


def within(root: Path, path: str) -> Path:
    """Return the machine's path of a container's path; its links must not lead out of the container's root."""
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
