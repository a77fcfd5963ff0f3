"""A real `moiety serve` with the scripted engine, as a process, for tests of the whole."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from tests.forked_workers import group_of
from tests.selection import (
    beyond_sample,
    days_of_rotated,
    expected_durations_s,
    fast_tests,
    further_mutants,
    of_other_days,
    repeated_combinations,
    sample_steps,
)

pytest_plugins = ["tests.forked_workers"]

gc.disable()  # during collection, which creates no garbage
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel, and further threads would only spin

os.environ.pop("SSL_CERT_FILE", None)  # no test's server has a certificate of an authority, and each HTTP client
os.environ["SSL_CERT_DIR"] = os.devnull  # would read all 140 authorities' certificates for 30 ms


if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, which reads it once


THOROUGH = bool(os.environ.get("MOIETY_TEST_ALL"))  # every combination: make test-all
FAST = bool(os.environ.get("MOIETY_TEST_FAST"))  # test functions that are short, once each: make test-fast
MEASURED = bool(os.environ.get("MOIETY_TEST_MEASURED"))  # all tests that the lists of durations leave out, too
SAMPLE = int(os.environ.setdefault("MOIETY_TEST_SAMPLE", str(int(time.time() // 86_400))))  # another one each day
TESTS = Path(__file__).parent
HELPERS = [path for path in TESTS.rglob("*.py") if not path.name.startswith(("test_", "conftest", "selection"))]
EXAMPLES = 100 if THOROUGH else 25  # for properties whose test sets no number

# an assertion that fails in a helper module shows its values, too
pytest.register_assert_rewrite(*(".".join(path.relative_to(TESTS.parent).with_suffix("").parts) for path in HELPERS))


def examples(count: int) -> int:
    """Return the number of random examples of a property: `count` in `make test-all`, and a quarter else."""
    return count if THOROUGH else count // 4


# no deadline: the time of an example depends on the machine's load
hypothesis.settings.register_profile("moiety", deadline=None, max_examples=EXAMPLES)
hypothesis.settings.load_profile("moiety")


def pytest_report_header() -> str:
    return f"sample of long functions: {SAMPLE}; MOIETY_TEST_SAMPLE={SAMPLE} repeats it, and MOIETY_TEST_ALL=1 runs all"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `thorough`, most combinations of parameters, tests beyond the sample of functions marked
    `one_in` or of long ones, the longest functions of other days, and most mutants unless all are wanted, and most
    tests where only the fast ones are. Where workers take a file at a time, those that take longest come first, so
    that none is left to the end."""
    if not THOROUGH:
        _deselect(config, items, {item for item in items if item.get_closest_marker("thorough")})
        _deselect(config, items, repeated_combinations(items) | further_mutants(items))
        steps, days = ({}, {}) if MEASURED else (sample_steps(), days_of_rotated())
        _deselect(config, items, beyond_sample(items, steps, SAMPLE, days))
        _deselect(config, items, of_other_days(items, days, SAMPLE))
    if FAST:
        _deselect(config, items, set(items).difference(fast_tests(items)))
    if config.getoption("workers"):
        seconds: defaultdict[str, float] = defaultdict(float)
        for item, expected_s in zip(items, expected_durations_s(items), strict=True):
            seconds[group_of(item)] += expected_s
        items.sort(key=lambda item: (-seconds[group_of(item)], item.path))


def _deselect(config: pytest.Config, items: list[pytest.Item], left_out: set[pytest.Item]) -> None:
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def pytest_collection_finish() -> None:
    """Exempt everything that was collected from garbage collection."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # tests create many objects, which a threshold of 700 would scan often
    gc.enable()


_file = pytest.StashKey[Path]()
_umask = os.umask(0o022)
os.umask(_umask)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Look through what the files before this one left once, and never again: collections of garbage, of which engines
    make some of their own, cost no more at the end of a run than at its beginning."""
    os.umask(_umask)  # commands that a test calls in this process set their own
    if item.config.stash.get(_file, None) != item.path:
        item.config.stash[_file] = item.path
        gc.collect()
        gc.freeze()


DEADLINE_S = 120.0  # generous: the machine may be busy
POLL_S = 0.02
KEY = re.compile(r"mty_[A-Za-z0-9]+\.[A-Za-z0-9]+")
PORTS = range(10_240, 32_768)  # below the ports that the kernel assigns
_chance = random.SystemRandom()  # not seeded: equal seeds in several processes must not give equal ports


def wait_for(read: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait until `read` returns something true, and return that."""
    end = time.monotonic() + deadline_s
    while not (found := read()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(POLL_S)
    return found


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port to listen on later. Another call gets the same port only by chance."""
    family, *_ = socket.getaddrinfo(host, 0)[0]
    while True:
        port = _chance.choice(PORTS)
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port


@dataclass
class Serve:
    """A `moiety serve` that runs or has run."""

    process: subprocess.Popen[bytes]
    log: Path
    data_dir: Path

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def wait_for_line(self, text: str, times: int = 1) -> str:
        """Wait until the output has a line with `text` (so many of them); the last of them."""

        def find() -> list[str]:
            assert self.process.poll() is None or text in self.output, f"serve ended:\n{self.output}"
            lines = [line for line in self.output.splitlines() if text in line]
            return lines if len(lines) >= times else []

        return wait_for(find, f"a line with {text!r}")[-1]

    @property
    def url(self) -> str:
        return self.wait_for_line("moiety is ready at").rsplit(" ", 1)[1]

    @property
    def tenant_key(self) -> str:
        return KEY.findall(self.output)[-1]

    @property
    def admin_key(self) -> str:
        found = re.search(r'"admin_key": "([^"]+)"', (self.data_dir / "keys.json").read_text(encoding="utf-8"))
        assert found is not None
        return found[1]

    def part(self, name: str) -> psutil.Process:
        """Return the process of a part."""
        for child in psutil.Process(self.process.pid).children():
            if name in child.cmdline()[5:6]:
                return child
        raise AssertionError(f"no {name} runs")

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, signal_number: int = signal.SIGINT) -> int:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal_number)
        return self.process.wait(DEADLINE_S)


StartServe = Callable[..., Serve]


@pytest.fixture(scope="module")
def start_serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServe]:
    """Start `moiety serve --scripted` with further options; all are stopped at the end of the module."""
    started: list[Serve] = []

    def start(*options: str, data_dir: Path | None = None) -> Serve:
        directory = data_dir or tmp_path_factory.mktemp("data")
        log = tmp_path_factory.mktemp("log") / "serve.log"
        command = [sys.executable, "-m", "moiety_platform.cli", "serve", "--scripted", "--port", "0"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, "--data-dir", str(directory), *options],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(Serve(process, log, directory))
        return started[-1]

    yield start
    for serve in started:
        if serve.process.poll() is None:
            serve.process.kill()
        serve.process.wait(DEADLINE_S)
