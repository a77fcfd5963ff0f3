"""The file of tuned choices: one JSON file per device, in the user's cache folder.

`{"format": 1, "device": NAME, "operations": {OPERATION: {"version": DIGEST, "choices": {PROBLEM: {"candidate": {…},
"time_us": …}}}}}`. The version is a digest of the operation's sources and Triton's version: choices for other kernels
are never used. Reading fails open: without a readable file nothing is tuned, and a warning is logged.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import moiety_kernels
from moiety_kernels.files import write_whole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CACHE_VARIABLE = "MOIETY_TUNING_DIR"
_FORMAT = 1
_SHARED = ("gpu",)  # packages with code that every kernel depends on
_log = logging.getLogger(__name__)
CandidateT = TypeVar("CandidateT", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest candidate of one problem, as plain data, and its time."""

    candidate: dict[str, Any]
    time_us: float


@dataclass(slots=True)
class Choices:
    """Choices of one device.

    `found` holds those whose version matches the kernels here; the next write drops the others.
    """

    path: Path
    device: str
    found: dict[str, dict[str, Choice]] = field(default_factory=dict)  # by operation and problem

    def get(self, operation: str, problem: str) -> Choice | None:
        return self.found.get(operation, {}).get(problem)

    def put(self, operation: str, problem: str, choice: Choice) -> None:
        """Store the choice, also on disk: atomically, merged with those that other processes wrote meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.path.with_suffix(".lock")):
            self.found = read(self.path, self.device).found
            self.found.setdefault(operation, {})[problem] = choice
            write_whole(self.path, json.dumps(self._as_json(), indent=1) + "\n")

    def _as_json(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "device": self.device,
            "operations": {
                operation: {
                    "version": source_version(operation),
                    "choices": {problem: asdict(choice) for problem, choice in sorted(choices.items())},
                }
                for operation, choices in sorted(self.found.items())
            },
        }


def cache_folder() -> Path:
    """Return the folder of tuned choices: MOIETY_TUNING_DIR, else below XDG_CACHE_HOME, else below ~/.cache.

    All processes of a user must find a GPU's file, so its location is an environment variable and not a setting of one
    process.
    """
    own, base = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(base) if base else Path.home() / ".cache") / "moiety" / "tuning"


def path_of(device: str, folder: Path | None = None) -> Path:
    return (folder or cache_folder()) / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def read(path: Path, device: str) -> Choices:
    """Return the file's choices for these kernels on this device.

    The result is empty if there is no file, and empty with a warning if the file cannot be read.
    """
    choices = Choices(path, device)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return choices
    except (OSError, UnicodeDecodeError) as exc:
        _log.warning("tuned choices in %s cannot be read (%s); the cost model chooses", path, exc)
        return choices
    try:
        choices.found = _parse(json.loads(text), device)
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        what = f"{type(exc).__name__}: {exc}"
        _log.warning(
            "tuned choices in %s are invalid (%s); run `moiety kernels tune` to write the file again", path, what
        )
    return choices


def _parse(report: Any, device: str) -> dict[str, dict[str, Choice]]:
    if report["format"] != _FORMAT or report["device"] != device:
        return {}
    return {
        operation: {
            problem: Choice(dict(choice["candidate"]), float(choice["time_us"]))
            for problem, choice in kept["choices"].items()
        }
        for operation, kept in report["operations"].items()
        if kept["version"] == source_version(operation)
    }


def tuned(operation: str, problem: str, candidates: Sequence[CandidateT], device: str) -> CandidateT | None:
    """Return the one of `candidates` that was fastest for `problem` on the named device.

    Return None if the problem is not tuned, or if the fastest is not a candidate. The first call of a process reads the
    file.
    """
    choice = _read_once(path_of(device), device).get(operation, problem)
    if choice is None:
        return None
    return next((one for one in candidates if asdict(one) == choice.candidate), None)


@functools.cache
def _read_once(path: Path, device: str) -> Choices:
    return read(path, device)


@functools.cache
def source_version(operation: str) -> str:
    """Return a digest of the sources of the operation's kernels and of the compiler's version."""
    package = Path(moiety_kernels.__file__).parent
    digest = hashlib.sha256(_triton_version().encode())
    for folder in (operation, *_SHARED):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's lock for one writer across processes; the system releases it when its holder ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
