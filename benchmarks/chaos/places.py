"""Networks, a small disk and a clock that belong to the run, so that faults do not affect the machine.

`enter` has this process run again in namespaces that end with it. Root needs no more than that; another user gets a
namespace of users as well, where the kernel allows it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from moiety_podrun.network import Network
from moiety_podrun.policies import Peer

INSIDE = "MOIETY_CHAOS_INSIDE"  # set for the process that has namespaces of its own
BEFORE_ALL = "50"  # priority of a rule that cuts, before those that allow


class CannotStage(Exception):
    """Error of a machine that lacks something; the message says what to do."""


def enter(module: str) -> None:
    """Run this command, `python -m MODULE`, again in new namespaces; return only there. Raises CannotStage."""
    if INSIDE in os.environ:
        if os.geteuid():  # whose names of networks are kept in a folder that is root's
            run("mount", "-t", "tmpfs", "none", "/run")
            Path("/run/netns").mkdir()
        return
    users = ["--user", "--map-current-user", "--keep-caps"] if os.geteuid() else []
    words = ["unshare", *users, "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = [*words, sys.executable, "-m", module, *sys.argv[1:]]
    if subprocess.run([*words, "true"], check=False).returncode:
        raise CannotStage(
            "this needs Linux, util-linux and, where the kernel forbids namespaces to users, its root user"
        )
    os.execvpe(command[0], command, os.environ | {INSIDE: "1"})


class Wires:
    """A network for each part of the run, by name, and faults of the links between them."""

    def __init__(self, names: list[str]) -> None:
        self._network = Network([])
        self.peers: dict[str, Peer] = {name: self._network.add(name, {}, {}) for name in names}

    def within(self, name: str) -> list[str]:
        """Return the words to put before a command so that it runs in that network, as the same process."""
        return ["nsenter", f"--net=/run/netns/{name}", "--"] if name in self.peers else []

    @contextlib.contextmanager
    def cut(self, one: str, other: str) -> Iterator[None]:
        """Drop all packets between the two parts without an error."""
        a, b = self.peers[one].address, self.peers[other].address
        rules = [("from", source, "to", target, "priority", BEFORE_ALL) for source, target in ((a, b), (b, a))]
        for rule in rules:
            run("ip", "rule", "add", *rule, "blackhole")
        try:
            yield
        finally:
            for rule in rules:
                run("ip", "rule", "delete", *rule)

    @contextlib.contextmanager
    def slow(self, name: str, bits_per_s: int) -> Iterator[None]:
        """Limit the rate to and from a part; excess packets wait up to half a second and are then dropped."""
        shape = ["tbf", "rate", f"{bits_per_s}bit", "burst", "3kb", "latency", "500ms"]
        outer = self._wire(name)
        run("tc", "qdisc", "add", "dev", outer, "root", *shape)
        run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *shape)
        try:
            yield
        finally:
            run("tc", "qdisc", "del", "dev", outer, "root")
            run("tc", "-n", name, "qdisc", "del", "dev", "eth0", "root")

    def _wire(self, name: str) -> str:
        """Return the router's end of the link."""
        told = run("ip", "route", "get", self.peers[name].address)
        return told.split(" dev ")[1].split()[0]


class SmallDisk:
    """A file system of a few megabytes, in memory."""

    def __init__(self, folder: Path, mebibytes: int) -> None:
        folder.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "none", str(folder))
        folder.chmod(0o755)
        self.folder = folder

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Fill the disk until no byte is free."""
        ballast = self.folder / "ballast"
        try:
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(65536))
            with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(256))
            yield
        finally:
            ballast.unlink()

    def close(self) -> None:
        run("umount", "--lazy", str(self.folder))


class WrongClock:
    """Wrong wall clock for the processes that are started with `environment`; their monotonic clock stays right.

    Uses libfaketime, which is in the `dev` extra.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import libfaketime
        except ImportError as error:
            raise CannotStage("install libfaketime, as the extra `dev` does, for clocks that jump") from error
        library = Path(libfaketime.__file__).parent / "vendor/libfaketime/src/libfaketime.so.1"
        self._file = folder / "clock"
        self.set(0)
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",  # seconds after which it looks again
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, ahead_s: float) -> None:
        """Set the clock this number of seconds ahead or behind."""
        draft = self._file.with_name(f"clock-{uuid.uuid4().hex}")
        draft.write_text(f"{ahead_s:+.3f}\n")
        draft.replace(self._file)


def run(*words: str) -> str:
    """Return the output of a command. Raises CannotStage."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise CannotStage(f"there is no command {words[0]}: install iproute2 and util-linux") from error
    if done.returncode:
        raise CannotStage(f"{' '.join(words)}: {done.stderr.strip()}; this needs Linux and iproute2")
    return done.stdout
