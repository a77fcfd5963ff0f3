"""Disaggregated prefill and decode over several ranks, in real processes on gloo."""

from __future__ import annotations

import contextlib
import itertools
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from moiety_engine.config import KvTransport, TransferConfig
from moiety_engine.distribution.layout import Layout
from moiety_engine.messages import CoreSubmit
from moiety_engine.planning.layout_support import LAYOUTS, why_unavailable
from moiety_wire.classes import STANDARD
from moiety_wire.messages import FinishReason, Sampling
from moiety_wire.roles import EngineRole, KvHandoff, KvRanks, transfer_group, transfer_token

from .rank_processes import RankProcesses, assert_same, settings_of, thorough
from .role_engine import RoleOutput

SCRIPT = Path(__file__).parent / "role_engine.py"
FAMILY = "qwen3_moe"
LISTEN = "tcp://127.0.0.1:0"
DEADLINE_S = 120.0
LENGTH = 6


class EngineEnded(Exception):
    """The engine's processes have ended."""


class RoleEngine:
    """An engine with a role in its own processes."""

    def __init__(self, folder: Path, role: EngineRole, way: KvTransport, **settings: Any) -> None:
        self.folder, self.role, self.way, self.settings = folder, role, way, settings
        listen = LISTEN if role is EngineRole.DECODE else ""
        config = settings_of(folder, **settings)
        config = msgspec.structs.replace(config, transfer=TransferConfig(role=role, listen=listen, transport=way))
        arguments = [sys.executable, str(SCRIPT), msgspec.json.encode(config).decode()]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(arguments, **pipes)
        self.address = self.host = self.secret = ""
        self.ranks = KvRanks()

    def started_again(self) -> RoleEngine:
        """Wait until all of its processes have ended, and return a new engine."""
        self.end()
        again = RoleEngine(self.folder, self.role, self.way, **self.settings)
        again.wait_ready()
        return again

    def wait_ready(self) -> None:
        found = msgspec.json.decode(self._line(), type=tuple[str, str, str, KvRanks])
        self.address, self.host, self.secret, self.ranks = found

    def submit(self, submit: CoreSubmit) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(submit) + b"\n")
        self.process.stdin.flush()

    def output(self) -> RoleOutput:
        return msgspec.json.decode(self._line(), type=RoleOutput)

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError, OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(timeout=DEADLINE_S)
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()

    def kill_rank(self, rng: random.Random) -> None:
        """Kill one rank; the others must end by themselves."""
        ranks = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children()]
        rng.choice(ranks).kill()

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"> "):
                found: bytes = line[2:]
                return found
        raise EngineEnded


class Pair:
    """A prefill and a decode engine, and the part of a gateway between them."""

    def __init__(self, prefill: RoleEngine, decode: RoleEngine) -> None:
        self.prefill, self.decode = prefill, decode
        self.num_arrived = 0  # requests that continued with the KV of the prefill engine

    def run(
        self,
        submits: list[CoreSubmit],
        *,
        loses_part: bool = False,
        before_output: Callable[[RoleEngine, int], None] = lambda *_: None,
    ) -> dict[str, list[int]]:
        """Return the tokens of all requests.

        `loses_part` sends the part of the last rank to an address at which nobody listens. `before_output` is called
        with the engine and the number of its outputs so far. An engine that has ended is started again: the decode
        engine answers what the prefill engine has left, and is asked again for what it has left itself."""
        tokens: dict[int, list[int]] = {submit.key: [] for submit in submits}
        following, self.num_arrived = {}, 0
        for submit in submits:
            transfer_id, address = secrets.token_hex(16), self.decode.address
            if loses_part:
                addresses, ranks = address.split(","), self.decode.ranks
                groups = Layout(tp=ranks.tp, pp=ranks.pp, dp=ranks.groups).groups
                addresses[groups[transfer_group(transfer_id, ranks.groups)][-1]] = "tcp://127.0.0.1:9"
                address = ",".join(addresses)
            token = transfer_token(self.decode.secret, transfer_id)
            there = KvHandoff(transfer_id, address, self.decode.host, token, self.decode.ranks)
            self.prefill.submit(msgspec.structs.replace(submit, hand_over=there))
            following[submit.key] = msgspec.structs.replace(submit, transfer_id=transfer_id)
        left = set(tokens)

        def take(output: RoleOutput) -> None:
            tokens[output.key] += output.token_ids
            if output.reason:
                left.discard(output.key)
                self.num_arrived += output.has_arrived

        def go_on(output: RoleOutput) -> None:
            take(output)
            if output.reason:
                assert output.reason == str(FinishReason.PREFILL_DONE)
                transfer_id = "" if output.detail else following[output.key].transfer_id
                self.decode.submit(_resumed(following[output.key], tokens[output.key], transfer_id))

        if not self._read(self.prefill, left, go_on, before_output):
            for key in left:  # the gateway does not know what has been sent
                self.decode.submit(_resumed(following[key], tokens[key], following[key].transfer_id))
            self.prefill = self.prefill.started_again()
        left.update(tokens)
        while not self._read(self.decode, left, take, before_output):
            self.decode = self.decode.started_again()
            for key in left:
                self.decode.submit(_resumed(following[key], tokens[key], ""))
        return {str(key): one for key, one in tokens.items()}

    def _read(
        self,
        engine: RoleEngine,
        left: set[int],
        take: Callable[[RoleOutput], None],
        before_output: Callable[[RoleEngine, int], None],
    ) -> bool:
        """Take outputs until no request is left; return False if the engine has ended before."""
        for number in itertools.count():
            if not left:
                break
            before_output(engine, number)
            try:
                take(engine.output())
            except EngineEnded:
                return False
        return True


def _resumed(submit: CoreSubmit, tokens: list[int], transfer_id: str) -> CoreSubmit:
    return msgspec.structs.replace(submit, resumed_ids=tokens.copy() or None, transfer_id=transfer_id)


@contextlib.contextmanager
def pair_of(
    folder: Path, prefill: dict[str, Any], decode: dict[str, Any], way: KvTransport = KvTransport.TCP
) -> Iterator[Pair]:
    if way is KvTransport.NIXL:
        pytest.importorskip("nixl")
    engines = [RoleEngine(folder, EngineRole.PREFILL, way, **prefill)]
    engines.append(RoleEngine(folder, EngineRole.DECODE, way, **decode))
    try:
        for engine in engines:
            engine.wait_ready()
        pair = Pair(*engines)
        yield pair
        engines = [pair.prefill, pair.decode]
    finally:
        for engine in engines:
            engine.end()


def asked(num_requests: int) -> list[CoreSubmit]:
    def one(key: int) -> CoreSubmit:
        prompt = [3 + (key * 31 + i * 7) % 380 for i in range(9 + key % 13)]
        sampled = Sampling(temperature=0.8, top_p=0.9, seed=key, num_logprobs=2)
        sampling = sampled if key % 2 else Sampling(temperature=0.0, num_logprobs=2)
        return CoreSubmit(key, "t", STANDARD, prompt, sampling, LENGTH, 0, [], LENGTH, b"s", time.time_ns())

    return [one(key) for key in range(num_requests)]


def expected_of(processes: RankProcesses, folder: Path, submits: list[CoreSubmit]) -> dict[str, Any]:
    (found,) = processes.work((settings_of(folder), None), waves=[submits])
    answers: dict[str, Any] = found
    return answers


def assert_answers(expected: dict[str, Any], tokens: dict[str, list[int]]) -> None:
    assert_same(expected, expected | {"token_ids": tokens})


OVER_RANKS = [
    layout for layout in LAYOUTS if LAYOUTS[layout] and not why_unavailable("KV transfer from other engines", layout)
]


@pytest.mark.parametrize("layout", [one if one == "TP" else thorough(one) for one in OVER_RANKS])
def test_each_rank_receives_its_part_and_answers_are_those_of_one_rank(
    processes: RankProcesses, folders: dict[str, Path], layout: str
) -> None:
    submits = asked(12)
    expected = expected_of(processes, folders[FAMILY], submits)
    with pair_of(folders[FAMILY], LAYOUTS[layout], LAYOUTS[layout]) as pair:
        tokens = pair.run(submits)
        assert_answers(expected, tokens)
        assert pair.num_arrived == len(submits)
        again = pair.run([msgspec.structs.replace(submits[0], key=100)], loses_part=True)
        assert (again["100"], pair.num_arrived) == (tokens["0"], 0), "no rank may continue with a part of the KV"


PAIRS = {  # of different layouts: prefill and decode
    "TP 2 to 1": ({"tp": 2}, {}),
    "TP 1 to 2": ({}, {"tp": 2}),
    "TP 2 to 4": ({"tp": 2}, {"tp": 4}),
    "TP 4 to 2": ({"tp": 4}, {"tp": 2}),
    "PP 2 to 1": ({"pp": 2}, {}),
    "PP 1 to 2": ({}, {"pp": 2}),
    "TP 2 to PP 2": ({"tp": 2}, {"pp": 2}),
    "DP 2 to TP 2": ({"dp_attention": 2, "ep": 2}, {"tp": 2}),
    "1 to DP 2 × TP 2": ({}, {"dp_attention": 2, "tp": 2, "ep": 2}),
    "DP 2 in halves to 1": ({"dp_attention": 2, "ep": 2, "two_batch_overlap": "on"}, {}),
    "DCP 2 to 1": ({"tp": 2, "decode_context_parallel": 2}, {}),
    "1 to DCP 2": ({}, {"tp": 2, "decode_context_parallel": 2}),
    "DCP 2 to 4": ({"tp": 2, "decode_context_parallel": 2}, {"tp": 4, "ep": 2, "decode_context_parallel": 4}),
    "DCP 4 to 2 × 2": ({"tp": 4, "decode_context_parallel": 4}, {"tp": 4, "decode_context_parallel": 2}),
    "DCP 2 to PP 2": ({"tp": 2, "decode_context_parallel": 2}, {"pp": 2}),
    "DCP of heads to TP 2": ({"tp": 4, "decode_context_parallel": 2}, {"tp": 2}),
    "1 to DCP of heads": ({}, {"tp": 4, "decode_context_parallel": 2}),
    "PCP 2 to 1": ({"prefill_context_parallel": 2, "ep": 2}, {}),
    "1 to PCP 2": ({}, {"prefill_context_parallel": 2, "ep": 2}),
    "PCP 2 × TP 2 to TP 2": ({"prefill_context_parallel": 2, "tp": 2, "ep": 4}, {"tp": 2}),
    "TP 2 to PCP 2 × TP 2": ({"tp": 2}, {"prefill_context_parallel": 2, "tp": 2, "ep": 4}),
    "FFN 1 with micro-batches to 1": ({"ffn_ranks": 1, "micro_batch_tokens": 2}, {}),
}
OF_LATENT_ROWS = ["DCP 2 to 1", "1 to DCP 2", "DCP 2 to 4", "DCP 4 to 2 × 2", "DCP 2 to PP 2"]
KINDS = ["deepseek_v3", "qwen3_next", "kimi_linear", "granitemoehybrid", "jamba", "nemotron_h", "gpt_oss"]
KINDS += ["deepseek_v4", "minimax", "zaya", "granitemoehybrid, one group"]


@pytest.mark.parametrize(
    ("family", "pair_name"),
    [
        *((FAMILY, name) for name in ("TP 2 to 1", "TP 1 to 2")),
        *(thorough(FAMILY, name) for name in list(PAIRS)[2:] if name not in OF_LATENT_ROWS),
        *(("deepseek_v3", name) for name in OF_LATENT_ROWS[:2]),
        *(thorough("deepseek_v3", name) for name in OF_LATENT_ROWS[2:]),
        thorough("kimi_linear", "DCP 2 to 1"),
        thorough("gpt_oss", "DCP of heads to TP 2"),
        *(thorough(family, name) for family in ("deepseek_v3", "gpt_oss") for name in ("PCP 2 to 1", "1 to PCP 2")),
        *(thorough(family, name) for family in KINDS for name in list(PAIRS)[:2]),
    ],
)
def test_ranks_of_different_layouts_exchange_the_shards_that_they_need(
    processes: RankProcesses, folders: dict[str, Path], family: str, pair_name: str
) -> None:
    submits = asked(6)
    with pair_of(folders[family], *PAIRS[pair_name]) as pair:
        tokens = pair.run(submits)
    assert_answers(expected_of(processes, folders[family], submits), tokens)
    assert pair.num_arrived == len(submits)


@pytest.mark.parametrize("pair_name", ["TP 2 to 1", *(thorough(name) for name in ("TP 2 to 4", "DCP 2 to PP 2"))])
def test_ranks_read_the_shards_that_they_need_by_nixl(
    processes: RankProcesses, folders: dict[str, Path], pair_name: str
) -> None:
    family, submits = FAMILY if pair_name.startswith("TP") else "deepseek_v3", asked(6)
    with pair_of(folders[family], *PAIRS[pair_name], KvTransport.NIXL) as pair:
        tokens = pair.run(submits)
    assert_answers(expected_of(processes, folders[family], submits), tokens)
    assert pair.num_arrived == len(submits)


@pytest.mark.timeout(900)  # each wave starts an engine again
@pytest.mark.parametrize(
    ("num_requests", "num_kills", "tp", "way"),
    [
        (8, 1, 2, KvTransport.TCP),
        thorough(100, 10, 2, KvTransport.TCP),
        thorough(100, 10, 1, KvTransport.TCP),
        thorough(100, 10, 1, KvTransport.NIXL),
    ],
)
def test_no_answer_is_lost_when_ranks_are_killed(
    processes: RankProcesses, folders: dict[str, Path], num_requests: int, num_kills: int, tp: int, way: KvTransport
) -> None:
    """One rank of either engine is killed in each wave. `tp` is that of the decode engine."""
    rng, submits = random.Random(num_requests), asked(num_requests)
    expected, num_arrived, killed = expected_of(processes, folders[FAMILY], submits), 0, list[RoleEngine]()
    tokens: dict[str, list[int]] = {}
    size = num_requests // num_kills
    with pair_of(folders[FAMILY], {"tp": 2}, {"tp": tp} if tp > 1 else {}, way) as pair:
        for wave in range(num_kills):
            victim, after = rng.choice([pair.prefill, pair.decode]), rng.randrange(1, size)

            def kill(engine: RoleEngine, number: int, victim: RoleEngine = victim, after: int = after) -> None:
                if engine is victim and number == after:
                    victim.kill_rank(rng)
                    killed.append(victim)

            tokens |= pair.run(submits[wave * size : (wave + 1) * size], before_output=kill)
            num_arrived += pair.num_arrived
    assert_answers(expected, tokens)
    assert num_arrived > 0 or num_kills == 1, "one kill may come before any KV has arrived"
    assert len(killed) == num_kills
