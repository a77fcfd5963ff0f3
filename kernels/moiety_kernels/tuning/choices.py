"""The file of tuned choices: one of JSON a device, under the user's cache folder.

`{"format": 1, "device": NAME, "operations": {OPERATION: {"version": DIGEST, "choices": {PROBLEM: {"candidate": {…},
"time_us": …}}}}}`. The version is a digest of the operation's sources and Triton's version: what was chosen for other
kernels is never used. Reading fails open: without a readable file nothing is tuned, and a warning says so.
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
_SHARED = ("gpu",)  # packages whose code every kernel depends on
_log = logging.getLogger(__name__)
CandidateT = TypeVar("CandidateT", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest candidate of one problem, as plain data, and its time."""

    candidate: dict[str, Any]
    time_us: float


@dataclass(slots=True)
class Choices:
    """One device's. `found` holds those whose version is that of the kernels here; the others are gone when it is
    written next."""

    path: Path
    device: str
    found: dict[str, dict[str, Choice]] = field(default_factory=dict)  # by operation and problem

    def get(self, operation: str, problem: str) -> Choice | None:
        return self.found.get(operation, {}).get(problem)

    def put(self, operation: str, problem: str, choice: Choice) -> None:
        """Keep the choice, on disk too: whole or not at all, beside those that others wrote meanwhile."""
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
    """Of tuned choices: MOIETY_TUNING_DIR, else below XDG_CACHE_HOME, else below ~/.cache. A GPU's file is found by
    every process of a user, so it stands in the environment and not among the settings of one."""
    own, base = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(base) if base else Path.home() / ".cache") / "moiety" / "tuning"


def path_of(device: str, folder: Path | None = None) -> Path:
    return (folder or cache_folder()) / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def read(path: Path, device: str) -> Choices:
    """What is in the file and was chosen for these kernels on this device; nothing where there is no file, and nothing
    with a warning where it cannot be read."""
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
        _log.warning("tuned choices in %s make no sense (%s); run `moiety kernels tune` to write them anew", path, what)
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
    """The one of `candidates` that was fastest for `problem` on the device of that name; None if nobody has tuned it,
    or if what was fastest is no candidate. Reads the file at the first call of a process."""
    choice = _read_once(path_of(device), device).get(operation, problem)
    if choice is None:
        return None
    return next((one for one in candidates if asdict(one) == choice.candidate), None)


@functools.cache
def _read_once(path: Path, device: str) -> Choices:
    return read(path, device)


@functools.cache
def source_version(operation: str) -> str:
    """A digest of the sources that the operation's kernels are made of, and of the compiler's version."""
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
    """One writer at a time, whatever process it is in; the lock goes with whoever holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
