"""Guardrails that are Python entry points: each text in a process of its own, with limits, failing open or closed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.guardrails.entry_point_checks import EntryPointChecks, EntryPointFailed
from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartGateway
from .test_guardrails import CHAT, asked, checks, saying

MIB = 1 << 20
MODULE = """
import ctypes, os, pathlib, sys, time

def words(request):
    return "forbidden" not in request["text"]

def process(request):
    return os.getpid() != int(request["text"])

def slow(request):
    time.sleep(60)
    return True

def busy(request):
    while True:
        pass

def greedy(request):
    return len(bytearray(1 << 30)) > 0

def raises(request):
    raise ValueError(request["text"])

def crashes(request):
    ctypes.string_at(0)

def writes(request):
    pathlib.Path(request["text"]).write_text("a")
    return True

def environment(request):
    return not any("SECRET" in name for name in os.environ) and os.environ["MOIETY_GUARDRAIL_LEVEL"] == "3"

def wrong(request):
    return "yes"
"""
BROKEN = "raise RuntimeError('at import')\n"
NAMES = ("words", "process", "slow", "busy", "greedy", "raises", "crashes", "writes", "environment", "wrong")


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with the entry points."""
    folder = tmp_path / "packages"
    info = folder / "checks-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "policy_checks.py").write_text(MODULE)
    (folder / "policy_broken.py").write_text(BROKEN)
    points = [f"{name} = policy_checks:{name}" for name in NAMES] + ["broken = policy_broken:check"]
    (info / "entry_points.txt").write_text("\n".join(["[moiety.guardrails]", *points]) + "\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: checks\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(folder))
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", str(folder) if not path else f"{folder}{os.pathsep}{path}")
    monkeypatch.setenv("MOIETY_GUARDRAIL_LEVEL", "3")
    monkeypatch.setenv("PROVIDER_SECRET", "x")
    return folder


@pytest.fixture
async def processes() -> Any:
    """The owner of the processes of guardrails."""
    owner = EntryPointChecks()
    yield owner
    await asyncio.to_thread(owner.close)


async def allows(
    owner: EntryPointChecks, name: str, text: str, timeout_s: float = 20.0, memory: int = 64 * MIB
) -> bool:
    return await owner.allows(name, json.dumps({"text": text}).encode(), timeout_s, memory)


async def test_a_text_is_checked_in_a_process_of_its_own(processes: EntryPointChecks) -> None:
    assert await allows(processes, "words", "hello")
    assert not await allows(processes, "words", "a forbidden word")
    assert await allows(processes, "process", str(os.getpid()))
    assert "policy_checks" not in sys.modules, "the gateway's process does not import it"


@pytest.mark.parametrize(
    ("name", "timeout_s", "reason"),
    [
        ("slow", 0.5, "timeout"),
        ("busy", 0.5, "timeout"),
        ("greedy", 20.0, "out_of_memory"),
        ("raises", 20.0, "exception: ValueError"),
        ("crashes", 20.0, "crash"),
        ("wrong", 20.0, "exception: returned str"),
        ("broken", 20.0, "not_loaded"),
        ("missing", 20.0, "not_loaded"),
    ],
)
async def test_a_check_that_takes_too_much_or_fails_has_a_reason_without_the_text(
    processes: EntryPointChecks, name: str, timeout_s: float, reason: str
) -> None:
    await allows(processes, "words", "starts the template of another check")
    if name not in ("broken", "missing"):
        with pytest.raises(EntryPointFailed):
            await allows(processes, name, "the text", 20.0 if timeout_s > 1 else 3.0)
    with pytest.raises(EntryPointFailed) as failed:
        await allows(processes, name, "the text", timeout_s)
    assert str(failed.value) == reason
    assert await allows(processes, "words", "hello"), "others go on"


async def test_a_process_writes_no_file_and_gets_no_secret(processes: EntryPointChecks, tmp_path: Path) -> None:
    place = tmp_path / "written"
    with pytest.raises(EntryPointFailed):
        await allows(processes, "writes", str(place))
    assert not place.exists() or not place.read_text()
    assert await allows(processes, "environment", "")


async def test_a_killed_template_starts_again(processes: EntryPointChecks) -> None:
    assert await allows(processes, "words", "hello")
    (template,) = processes._templates.values()
    os.kill(template.pid, signal.SIGKILL)
    assert await allows(processes, "words", "hello")
    assert template.restarts_total == 1


async def set_check(gateway: RunningGateway, stage: str, **fields: Any) -> Any:
    body = {"name": "g", "stage": stage, "timeout_ms": 20_000, **fields}
    return await gateway.admin("PUT", "/guardrails", body)


async def test_requests_and_answers_are_blocked(start_gateway: StartGateway, card: ModelCard) -> None:
    engine = FakeEngineClient(card, saying("a ", "forbidden", " word"))
    async with start_gateway([engine]) as gateway:
        view = await set_check(gateway, "input", entry_point="words", memory_mb=64)
        assert (view["entry_point"], view["url"], view["memory_mb"]) == ("words", None, 64)
        assert (await gateway.admin("GET", "/guardrails"))["data"] == [view]
        status, _, answer = await gateway.post(CHAT, asked("a forbidden word"))
        assert status == 400 and b"guardrail_blocked" in answer and not engine.submits
        await set_check(gateway, "output", entry_point="words")
        status, _, answer = await gateway.post(CHAT, asked("hello", stream=True))
        assert b"guardrail_blocked" in answer and b"forbidden" not in answer
        assert checks(gateway, "input", "blocked") == checks(gateway, "output", "blocked") == 1


@pytest.mark.parametrize(("on_failure", "status"), [("open", 200), ("closed", 503)])
async def test_a_check_that_fails_is_open_or_closed(
    start_gateway: StartGateway, card: ModelCard, on_failure: str, status: int
) -> None:
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        await set_check(gateway, "input", entry_point="crashes", on_failure=on_failure)
        found, _, answer = await gateway.post(CHAT, asked("hello"))
        assert found == status and (b"guardrail_unavailable" in answer) == (status == 503), answer
        assert checks(gateway, "input", f"failed_{on_failure}") == 1


async def test_only_entry_points_of_installed_packages_are_accepted(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        for wrong in (
            {"entry_point": "missing"},
            {"entry_point": "words", "detectors": ["secrets"]},
            {"url": "python:words"},
            {"entry_point": "words", "memory_mb": 1},
            {},
        ):
            await gateway.admin("PUT", "/guardrails", {"name": "g", "stage": "input", **wrong}, expect=400)
