"""`moiety engines …`: what the commands ask the gateway, show, and end with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from moiety_platform.cli import engines, main

from .answering_gateway import AnsweringGateway, answering_gateway

CARD = {"engine_id": "one", "model": "tiny", "role": "both"}
PROBLEM = "rank 2 ended with exit code 1"


def engine(**load: Any) -> dict[str, Any]:
    ranks = {"expert_ranks": 2, "requested_expert_ranks": 2, "expert_ranks_problem": ""}
    loads = {"num_running": 3, "num_waiting": 0, "sleep": "awake", "sleep_problem": ""} | ranks | load
    return {"address": "tcp://a:1", "healthy": True, "draining": False, "reason": "", "card": CARD, "load": loads}


@dataclass
class ScriptedGateway:
    """Answers with one state of the engine after the other; the last one stays."""

    states: list[dict[str, Any]] = field(default_factory=lambda: [engine()])
    server: AnsweringGateway = field(init=False)

    def reply(self, method: str) -> tuple[int, Any]:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return (200, {"data": [state]}) if method == "GET" else (202, state)

    @property
    def asked(self) -> list[tuple[str, str, bytes]]:
        return self.server.asked


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    scripted = ScriptedGateway()
    with answering_gateway(scripted.reply) as scripted.server:
        yield scripted


@pytest.fixture
def run(gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `moiety engines …`; return the exit code, the output and the standard error."""

    def command(*args: str) -> tuple[int, str, str]:
        code = 0
        try:
            main.main(["engines", *args, *gateway.server.options])
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


def test_engines_are_listed_with_their_ids_and_expert_ranks(run: Any, gateway: ScriptedGateway) -> None:
    gateway.states = [engine(expert_ranks=2, requested_expert_ranks=3)]
    code, out, _ = run("list")
    assert code == 0
    for word in ("one", "tiny", "tcp://a:1", "ready", "2", "3"):
        assert word in out
    assert json.loads(run("list", "--json")[1])["data"][0]["load"]["requested_expert_ranks"] == 3


def test_a_change_of_expert_ranks_is_awaited(run: Any, gateway: ScriptedGateway) -> None:
    gateway.states = [engine(), engine(requested_expert_ranks=3), engine(expert_ranks=3, requested_expert_ranks=3)]
    code, out, _ = run("expert-ranks", "one", "3", "--json")
    assert gateway.asked[0] == ("POST", "/admin/v1/engines/one/expert-ranks", b'{"num_ranks":3}')
    assert (code, json.loads(out)["load"]["expert_ranks"]) == (0, 3)


def test_a_change_that_the_engine_could_not_make_ends_with_1_and_the_reason(
    run: Any, gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "REFUSED_AFTER_S", 0.0)
    gateway.states = [engine(), engine(requested_expert_ranks=3), engine(expert_ranks_problem=PROBLEM)]
    code, _, err = run("expert-ranks", "one", "3")
    assert code == 1 and "keeps 2 expert ranks" in " ".join(err.split()) and PROBLEM in " ".join(err.split())


def test_a_change_that_takes_longer_than_the_wait_ends_with_1(run: Any, gateway: ScriptedGateway) -> None:
    gateway.states = [engine(), engine(requested_expert_ranks=3)]
    code, _, err = run("expert-ranks", "one", "3", "--wait-s", "0.1")
    assert code == 1 and "has 2 expert ranks after 0.1 s, and not 3" in " ".join(err.split())


def test_without_a_wait_the_engine_is_asked_once(run: Any, gateway: ScriptedGateway) -> None:
    assert run("expert-ranks", "one", "3", "--wait-s", "0")[0] == 0
    assert len(gateway.asked) == 1


@pytest.mark.parametrize("action", ["sleep", "wake"])
def test_an_engine_sleeps_and_wakes(run: Any, gateway: ScriptedGateway, action: str) -> None:
    assert run(action, "a/b")[0] == 0
    assert gateway.asked == [("POST", f"/admin/v1/engines/a%2Fb/{action}", b"")]
