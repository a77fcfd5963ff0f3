"""Launcher of the chart runner's containers, in a mount namespace of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from moiety_podrun import container

from .running import NEEDS_ROOT

USER = 54_321


@NEEDS_ROOT
def test_a_container_reads_a_private_folder_that_it_needs_though_a_volume_hides_it(tmp_path: Path) -> None:
    """As a checkout that `mktemp -d` made, below the /tmp of the container."""
    private, volume, names, base = (tmp_path / name for name in ("outer/private", "volume", "names", "base"))
    for folder in (private, volume, names, base):
        folder.mkdir(parents=True)
    (names / "hosts").touch()
    (private / "file").write_text("needed")
    private.chmod(0o700)
    shown = private / "file"
    spec = {
        "folder": str(base), "names": str(names), "needed": [str(private)], "user": USER, "group": USER,
        "mounts": [{"source": str(volume), "path": str(tmp_path / "outer"), "read_only": False}],
        "command": ["/bin/sh", "-c", f"id -u; cat {shown}; ! touch {shown} 2>/dev/null"], "environment": {},
    }  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    command = ["unshare", "--mount", sys.executable, str(container.LAUNCH), str(tmp_path / "spec.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{USER}\nneeded"), done.stderr
    assert private.stat().st_mode & 0o777 == 0o700, "the machine's own folder is as it was"
