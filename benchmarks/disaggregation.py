"""Disaggregated prefill and decode: equality of answers while engines are killed, and overlap of the KV transfer.

    python benchmarks/disaggregation.py [--requests 100] [--kills 10] [--tp 1:1 2:2 2:1] [--prompt-tokens 4000]
                                        [--skip kills|overlap]

Kills: two engines of each role on the demo model in float32, one gateway on SQLite, for each pair of `--tp` (that of
the engines of the role prefill, and of the role decode). Half of the requests are greedy, half have a seed; answers are
compared with those of one engine of both roles with the ranks of the role decode, since sums of several ranks round
otherwise than those of one. In the midst of each tenth of the requests, a process of a
random engine (its server, or any of its ranks) is killed (SIGKILL); the other processes of this engine have to end by
themselves, and it is restarted. Overlap: the share of a prompt's KV that has arrived by the end of its prefill. An
engine of the role prefill with random weights sends its KV to this process, which records each piece's arrival, by TCP
and by shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
import zmq
from ending import stop_processes

from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.distribution.layout import SINGLE_RANK
from moiety_engine.kv_transfer.cache_shards import CacheShare, share_on_rank
from moiety_engine.kv_transfer.messages import Begin, KvChunk
from moiety_engine.kv_transfer.receiver_thread import ReceiverThread
from moiety_engine.kv_transfer.staging_buffer import Progress, StagingBuffer
from moiety_engine.kv_transfer.transports import own_host
from moiety_engine.model.loading import load_model
from moiety_platform.bench.environment import describe_environment
from moiety_platform.clock import SystemClock
from moiety_platform.engine_client.transport import ZmqEngineClient
from moiety_platform.supervisor.ports import claim_port
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import LoadFormat
from moiety_wire.messages import Finished, Sampling, Stopping, Submit
from moiety_wire.roles import KvHandoff, transfer_token

HERE = Path(__file__).parent
CLI = [sys.executable, "-m", "moiety_platform.cli"]
START_S = 120.0
ROLES = ("prefill", "prefill", "decode", "decode")
WORDS = "What is {a} + {b}? Add {a} to {b}, and tell the capital of France as well."
SHAPE = {  # of the model whose KV is timed; its vocabulary is the demo model's
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1200, help="tokens of the longest answer")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tp", nargs="+", default=["1:1", "2:2", "2:1"], help="ranks of engines, prefill:decode")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", choices=("kills", "overlap"), default="")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "disaggregation.json")
    options = parser.parse_args()
    report: dict[str, Any] = {"date": date.today().isoformat(), "command": " ".join(["python", *sys.argv])}
    report["environment"] = describe_environment()
    with tempfile.TemporaryDirectory(prefix="moiety-roles-") as name:
        if options.skip != "kills":
            asyncio.run(kills(options, Path(name), report))
        if options.skip != "overlap":
            folder = make_checkpoint(Path(name) / "model")
            report["overlap"] = {way: asyncio.run(overlap(options, folder, way)) for way in ("tcp", "memory")}
            write(report, "overlap", options.output)


def write(report: dict[str, Any], part: str, output: Path) -> None:
    """Write the report so far, and print its new part."""
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report[part], indent=1), flush=True)


# ── kills ──


class Engines:
    """Engine processes that are killed and restarted, each at its own address."""

    def __init__(
        self, folder: Path, roles: Sequence[str], options: Sequence[str] = (), tp: Mapping[str, int] | None = None
    ) -> None:
        self._folder, self._roles, self._options, self._tp = folder, roles, options, tp or {}
        folder.mkdir(parents=True)
        self.addresses = [f"tcp://127.0.0.1:{claim_port('127.0.0.1', 0, '--port')}" for _ in roles]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        out = self._folder / f"engine-{number}.out"
        role, address = self._roles[number], self.addresses[number]
        command = [*CLI, "engine", "--role", role, "--listen", address, "--dtype", "float32", "--threads", "1"]
        command += ["--tp", str(self._tp.get(role, 1))]
        with out.open("wb") as stdout, (self._folder / f"engine-{number}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                [*command, "--name", "model", *self._options], stdin=subprocess.DEVNULL, stdout=stdout, stderr=log
            )

    def is_ready(self, number: int) -> bool:
        assert self._processes[number].poll() is None, (self._folder / f"engine-{number}.log").read_text()[-2000:]
        return "engine_ready" in (self._folder / f"engine-{number}.out").read_text()

    async def start_all(self) -> None:
        for number in range(len(self._roles)):
            self.start(number)
        for number in range(len(self._roles)):
            await until(lambda number=number: self.is_ready(number))

    async def kill(self, number: int, rng: random.Random) -> str:
        """Kill one process of an engine, and wait until all have ended. Return what it was, such as "decode rank 1"."""
        server = psutil.Process(self._processes[number].pid)
        (core,) = [one for one in server.children() if "moiety_engine.core" in one.cmdline()]
        workers = sorted(
            (one for one in core.children() if "moiety_engine.core.worker" in one.cmdline()), key=lambda one: one.pid
        )
        victims = {"server": server} | {f"rank {rank}": one for rank, one in enumerate([core, *workers])}
        role = self._roles[number]
        assert len(victims) == 1 + self._tp.get(role, 1), "not every rank was found"
        name, victim = rng.choice(list(victims.items()))
        victim.kill()
        await until(lambda: self._processes[number].poll() is not None)
        await until(lambda: not any(_runs(one) for one in (core, *workers)))
        return f"{role} {name}"

    def stop(self) -> None:
        stop_processes(self._processes.values(), wait_s=20)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until(is_so: Any) -> None:
    async with asyncio.timeout(START_S):
        while not is_so():  # noqa: ASYNC110 - processes announce nothing
            await asyncio.sleep(0.1)


async def kills(options: argparse.Namespace, folder: Path, report: dict[str, Any]) -> None:
    """Report, for each pair of `--tp`, how many answers are those of one engine although engines are killed."""
    requests = [body(number, options) for number in range(options.requests)]
    report["kills"] = {}
    right: dict[int, list[dict[str, Any]]] = {}  # by ranks
    for pair in options.tp:
        num_ranks = int(pair.partition(":")[2])
        if num_ranks not in right:
            async with serving(folder / f"one-{num_ranks}", ["both"], {"both": num_ranks}) as (_, ask, _engines):
                right[num_ranks] = [await ask(request) for request in requests]
            assert all(answer["status"] == 200 for answer in right[num_ranks]), "one engine alone has failed"
        found = await kills_of_pair(options, folder / pair.replace(":", "-"), pair, requests, right[num_ranks])
        report["kills"][pair] = found
        write(report, "kills", options.output)


async def kills_of_pair(
    options: argparse.Namespace, folder: Path, pair: str, requests: list[dict[str, Any]], right: list[dict[str, Any]]
) -> dict[str, Any]:
    """Send the requests in as many waves as there are kills; in the midst of each, an engine is killed."""
    prefill_tp, decode_tp = (int(number) for number in pair.split(":"))
    got: dict[int, Any] = {}
    killed: list[dict[str, Any]] = []
    size = options.requests // options.kills
    async with serving(folder, ROLES, {"prefill": prefill_tp, "decode": decode_tp}) as (admin, ask, engines):
        rng = random.Random(options.seed)

        async def client(waiting: list[int]) -> None:
            while waiting:
                number = waiting.pop(0)
                got[number] = await ask(requests[number])

        async def killer(before: int, wave: list[int]) -> None:
            answered, number = before + rng.randrange(max(1, size - options.clients)), rng.randrange(len(ROLES))
            await until(lambda: len(got) >= answered)
            await asyncio.sleep(rng.random() / 2)  # at any moment of an answer
            in_flight = before + size - len(wave) - len(got)
            process = await engines.kill(number, rng)
            killed.append({"process": process, "requests_in_flight": in_flight})
            engines.start(number)
            await until(lambda: engines.is_ready(number))

        begin_s = time.monotonic()
        for first in range(0, options.requests, size):
            wave = list(range(first, min(first + size, options.requests)))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(killer(first, wave))
                for _ in range(options.clients):
                    tasks.create_task(client(wave))
        took_s = time.monotonic() - begin_s
        loads = [engine["load"] or {} for engine in (await admin("/admin/v1/engines"))["data"]]
        metrics = (await admin("/metrics", as_json=False)).splitlines()
    same = sum(got[number] == right[number] for number in range(len(requests)))
    return {
        "requests": len(requests),
        "answered": sum(answer["status"] == 200 for answer in got.values()),
        "same_as_one_engine": same,
        "different": [number for number in range(len(requests)) if got[number] != right[number]],
        "killed": killed,
        "took_s": round(took_s, 1),
        "failovers": sum(float(line.split()[-1]) for line in metrics if line.startswith("moiety_failovers_total{")),
        "of_engines_that_live": {
            name: sum(load.get(name, 0) for load in loads)
            for name in ("prefill_done_requests_total", "disaggregated_decode_requests_total", "lost_transfers_total")
        },
    }


def body(number: int, options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(1000 * options.seed + number)
    prompt = " ".join(WORDS.format(a=rng.randrange(100), b=rng.randrange(100)) for _ in range(rng.randint(1, 12)))
    sampling = {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number}
    return {
        "model": "model",
        "prompt": prompt,
        "max_tokens": rng.randint(options.tokens // 4, options.tokens),
        "ignore_eos": True,
        **sampling,
    }


@contextlib.asynccontextmanager
async def serving(folder: Path, roles: Sequence[str], tp: Mapping[str, int] | None = None) -> Any:
    """Start engines of these roles and a gateway; yield (admin GET, tenant request, engines)."""
    engines = Engines(folder, roles, tp=tp)
    port = claim_port("127.0.0.1", 0, "--port")
    arguments = ["--data-dir", str(folder), "--port", str(port), "--migrate", "--first-keys", str(folder / "keys")]
    with contextlib.ExitStack() as stack:
        stack.callback(engines.stop)
        await engines.start_all()
        for address in engines.addresses:
            arguments += ["--engine", address]
        gateway = _start([*CLI, "gateway", *arguments], folder / "gateway.log")
        stack.callback(gateway.wait)
        stack.callback(gateway.terminate)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=START_S) as client:
            await until(lambda: _is_up(port))
            keys = json.loads((folder / "keys").read_text())
            await _until_all_healthy(client, keys["admin_key"], len(roles))

            async def admin(path: str, *, as_json: bool = True) -> Any:
                told = await client.get(path, headers={"Authorization": f"Bearer {keys['admin_key']}"})
                return told.json() if as_json else told.text

            async def ask(request: dict[str, Any]) -> dict[str, Any]:
                headers = {"Authorization": f"Bearer {keys['tenant_key']}"}
                answer = await client.post("/v1/completions", json=request, headers=headers)
                if answer.status_code != 200:
                    return {"status": answer.status_code, "error": answer.text}
                told = answer.json()
                usage = {name: told["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
                return {"status": 200, "text": told["choices"][0]["text"], **usage}

            yield admin, ask, engines


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def _is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.TransportError:
        return False


async def _until_all_healthy(client: httpx.AsyncClient, key: str, number: int) -> None:
    async with asyncio.timeout(START_S):
        while True:
            told = await client.get("/admin/v1/engines", headers={"Authorization": f"Bearer {key}"})
            if sum(engine["healthy"] for engine in told.json()["data"]) == number:
                return
            await asyncio.sleep(0.1)


# ── overlap ──


class TimedZone(StagingBuffer):
    """Staging buffer that records the arrival of each chunk."""

    def __init__(self, max_bytes: int, share: CacheShare) -> None:
        super().__init__(max_bytes, share)
        self.came: list[tuple[int, int]] = []  # unix nanoseconds, tokens of a layer

    def begin(self, begin: Begin, sender: bytes = b"") -> str:
        self.came.clear()
        return super().begin(begin, sender)

    def put(self, piece: KvChunk, frames: Sequence[memoryview], sender: bytes = b"") -> None:
        super().put(piece, frames, sender)
        self.came.append((time.time_ns(), piece.end - piece.first))


def make_checkpoint(folder: Path) -> Path:
    """Write a configuration and the demo model's tokenizer; weights are random."""
    demo = resolve_checkpoint("")
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo / name, folder)
    (folder / "config.json").write_text(json.dumps(json.loads((demo / "config.json").read_text()) | SHAPE))
    return folder


@contextlib.contextmanager
def receiving(folder: Path) -> Iterator[tuple[TimedZone, ReceiverThread]]:
    """Open a KV staging buffer for the model in this process."""
    torch.set_num_threads(1)
    model = load_model(folder, device="cpu", dtype="float32", load_format=LoadFormat.DUMMY)
    zone = TimedZone(1 << 30, share_on_rank(model.spec, SINGLE_RANK, keeps_hidden=False))
    zone.serve(model.allocate_kv(1, 4))
    receiver = ReceiverThread("tcp://127.0.0.1:0", zone, None)
    try:
        yield zone, receiver
    finally:
        receiver.close()


async def overlap(options: argparse.Namespace, folder: Path, way: str) -> dict[str, Any]:
    """Return, for some prompts, the share of the KV that had arrived at the first token."""
    flags = ["--model", str(folder), "--load-format", "dummy", "--kv-transport", way, "--kv-buffer-bytes", "1GiB"]
    engines = Engines(folder.parent / way, ["prefill"], flags)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = ZmqEngineClient(engines.addresses[0], context, SystemClock())
    try:
        await engines.start_all()
        await client.start()
        await until(lambda: client.state.healthy)
        with receiving(folder) as (zone, receiver):
            shares = [await _overlap_of_one(options, client, zone, receiver, n) for n in range(options.prompts)]
    finally:
        await client.close()
        engines.stop()
        context.destroy(linger=0)
    return {"prompt_tokens": options.prompt_tokens, "prompts": shares}


async def _overlap_of_one(
    options: argparse.Namespace, client: ZmqEngineClient, zone: TimedZone, receiver: ReceiverThread, number: int
) -> dict[str, Any]:
    rng = random.Random(number)
    transfer_id = secrets.token_hex(16)
    submit = Submit(
        request_id=f"prompt-{number}",
        seq=0,
        model="model",
        tenant_id="tenant",
        service=STANDARD,
        prompt_ids=[rng.randrange(10, 2000) for _ in range(options.prompt_tokens)],
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_tokens=8, ignore_eos=True),
        credit_tokens=8,
        cache_salt=b"",
        arrival_unix_ns=time.time_ns(),
        hand_over=KvHandoff(transfer_id, receiver.address, own_host(), transfer_token(receiver.secret, transfer_id)),
    )
    async with client.open(submit) as stream:
        ends = [message async for message in stream.messages() if isinstance(message, Finished)]
    await until(lambda: zone.claim(transfer_id) is Progress.THERE)
    phases, whole = ends[0].phases, sum(count for _, count in zone.came)
    early = sum(count for at_ns, count in zone.came if at_ns <= phases.first_token_unix_ns)
    last_ns = max(at_ns for at_ns, _ in zone.came)
    zone.drop(transfer_id)
    return {
        "prefill_s": round((phases.first_token_unix_ns - phases.scheduled_unix_ns) / 1e9, 3),
        "share_of_bytes_within_prefill": round(early / whole, 4),
        "tail_ms": round((last_ns - phases.first_token_unix_ns) / 1e6, 1),
        "pieces": len(zone.came),
    }


if __name__ == "__main__":
    main()
