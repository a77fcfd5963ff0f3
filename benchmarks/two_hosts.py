"""An engine over two hosts, started by `torchrun` and by DeepSpeed's launcher, with faults under load.

The link between the hosts is cut for ten seconds, and a rank is killed.

    python benchmarks/two_hosts.py [--launchers torchrun deepspeed]

The hosts are network namespaces (see chaos/places.py), with one rank on each; a third has a second, single engine, so
that requests have an alternative. Processes that end are restarted at once with the same command, as systemd's
`Restart=always` or Kubernetes does; that restores the group without a person. For each fault the report has the time
until each remaining rank detected it (`rank_lost` in its log), the number of open requests at the group, the time until
the gateway had the group again, and the numbers of requests that failed or continued elsewhere. Exits with 1 if one
failed, or a rank took longer than 5 s.

DeepSpeed is installed into a separate folder, `--deepspeed`, if it is not there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import psutil
from chaos.places import Wires, enter

from moiety_platform.bench.environment import describe_environment

HERE = Path(__file__).parent
CLI = "moiety_platform.cli"
HOSTS, SINGLE_HOST = ("host-0", "host-1"), "host-2"
ENGINE_PORT, MASTER_PORT, GATEWAY_PORT = 5757, 29500, 8000
CUT_S, START_S, NOTICED_S = 10.0, 900.0, 5.0
CLIENTS, TOKENS = 6, 120
ENGINE = ["engine", "--device", "cpu", "--threads", "1", "--dtype", "float32", "--name", "model"]
DEEPSPEED = ["deepspeed", "hjson", "einops", "py-cpuinfo", "ninja", "msgpack"]  # what of its needs ours lacks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="+", choices=("torchrun", "deepspeed"), default=("torchrun", "deepspeed"))
    parser.add_argument("--deepspeed", type=Path, default=Path.home() / ".cache" / "moiety" / "deepspeed")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "two_hosts.json")
    options = parser.parse_args()
    if "deepspeed" in options.launchers:
        install_deepspeed(options.deepspeed)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    enter("two_hosts")
    report: dict[str, Any] = {"date": date.today().isoformat(), "command": " ".join(["python", *sys.argv])}
    report["environment"] = describe_environment()
    wires = Wires([*HOSTS, SINGLE_HOST])
    for launcher in options.launchers:
        with tempfile.TemporaryDirectory(prefix="moiety-hosts-") as name:
            report[launcher] = asyncio.run(Play(Path(name), wires, launcher, options.deepspeed).run())
            print(json.dumps({launcher: report[launcher]}), file=sys.stderr)
    faults = [fault for launcher in options.launchers for fault in report[launcher]["faults"].values()]
    slowest_s = max(seconds for fault in faults for seconds in fault["noticed_s"].values())
    failed = sum(report[launcher]["failed"] for launcher in options.launchers)
    report["verdict"] = {"slowest_noticed_s": slowest_s, "failed": failed}
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(0 if slowest_s <= NOTICED_S and not failed else 1)


def install_deepspeed(folder: Path) -> None:
    if not (folder / "deepspeed").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--target", str(folder), "--no-deps", "--no-build-isolation"]
        command += ["-c", str(HERE.parent / "constraints.txt"), *DEEPSPEED]
        subprocess.run(command, check=True, env=os.environ | {"DS_BUILD_OPS": "0"})


@dataclass
class Kept:
    """A process that is restarted whenever it ends."""

    command: list[str]
    environment: dict[str, str]
    log: Path
    num_starts: int = 0
    process: asyncio.subprocess.Process | None = None
    _task: asyncio.Task[None] | None = field(default=None)

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            with self.log.open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | self.environment
                )
            self.num_starts += 1
            await self.process.wait()
            await asyncio.sleep(1.0)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self.process is not None and self.process.returncode is None:
            for one in [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            await self.process.wait()

    def rank(self) -> psutil.Process:
        """Return the rank process of this host, below its launcher."""
        assert self.process is not None
        found = [
            one
            for one in psutil.Process(self.process.pid).children(recursive=True)
            if CLI in one.cmdline() and not any(part.startswith(("torch.dist", "deepspeed.")) for part in one.cmdline())
        ]
        return found[0]

    def told_lost(self) -> int:
        """Return how often a rank of this host has reported a lost rank."""
        return self.log.read_bytes().count(b'"rank_lost"') if self.log.exists() else 0


class Play:
    """Run of one launcher: all processes, the load, and the faults."""

    def __init__(self, folder: Path, wires: Wires, launcher: str, deepspeed: Path) -> None:
        self._wires = wires
        first = wires.peers[HOSTS[0]].address
        listen = [f"tcp://{wires.peers[name].address}:{ENGINE_PORT}" for name in (HOSTS[0], SINGLE_HOST)]
        hostfile = folder / "hosts"
        hostfile.write_text("".join(f"{wires.peers[name].address} slots=1\n" for name in HOSTS))
        environment = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        if launcher == "deepspeed":
            environment |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{deepspeed}"}
        opened = ["--allow-unauthenticated-tcp", "--allow-unauthenticated-ranks"]
        group = ["-m", CLI, *ENGINE, *opened, "--listen", listen[0], "--tp", "2"]
        self.hosts = []
        for number, name in enumerate(HOSTS):
            words = _torchrun(number, first) if launcher == "torchrun" else _deepspeed(number, first, hostfile)
            words += group if launcher == "torchrun" else ["--module", *group[1:]]
            self.hosts.append(Kept([*wires.within(name), sys.executable, *words], environment, folder / f"{name}.log"))
        alone = [
            *wires.within(SINGLE_HOST),
            sys.executable,
            "-m",
            CLI,
            *ENGINE,
            "--allow-unauthenticated-tcp",
            "--listen",
            listen[1],
        ]
        gateway = [sys.executable, "-m", CLI, "gateway", "--port", str(GATEWAY_PORT), "--migrate"]
        gateway += ["--data-dir", str(folder / "data"), "--first-keys", str(folder / "keys")]
        gateway += [part for address in listen for part in ("--engine", address)]
        self._others = [Kept(alone, environment, folder / "alone.log"), Kept(gateway, {}, folder / "gateway.log")]
        self._group = listen[0]
        self._folder = folder
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{GATEWAY_PORT}", timeout=300)
        self._answers: list[dict[str, Any]] = []

    async def run(self) -> dict[str, Any]:
        """Run every fault, one after the other."""
        async with self._running() as keys:
            owner: dict[str, Any] = {"Authorization": f"Bearer {keys['admin_key']}"}
            await self._until(lambda engines: sum(one["healthy"] for one in engines) == 2, owner)
            clients = [asyncio.create_task(self._ask(keys["tenant_key"], number)) for number in range(CLIENTS)]
            faults = {
                f"link cut for {CUT_S:.0f} s": await self._fault(owner, self._cut, (0, 1)),
                "rank 1 killed": await self._fault(owner, lambda: self._kill(1), (0,)),
                "rank 0 killed": await self._fault(owner, lambda: self._kill(0), (1,)),
            }
            self._stopping = True
            await asyncio.gather(*clients)
            metrics = (await self._client.get("/metrics", headers=owner)).text
        return {
            "faults": faults,
            "requests": len(self._answers),
            "failed": sum(answer["status"] != 200 or answer["tokens"] != TOKENS for answer in self._answers),
            "failovers": sum(map(_value, re.findall(r"^moiety_failovers_total{.*", metrics, re.MULTILINE))),
            "starts_of_each_host": [host.num_starts for host in self.hosts],
        }

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[dict[str, str]]:
        self._stopping = False
        parts = [*self.hosts, *self._others]
        try:
            for part in parts:
                part.start()
            async with asyncio.timeout(START_S):
                while not await self._is_up():  # noqa: ASYNC110 - processes announce nothing
                    await asyncio.sleep(0.2)
            yield json.loads((self._folder / "keys").read_text())
        finally:
            await asyncio.gather(*(part.stop() for part in parts))
            await self._client.aclose()

    async def _is_up(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await self._client.get("/readyz")).status_code == 200
        return False

    async def _fault(self, owner: dict[str, str], happen: Any, left: tuple[int, ...]) -> dict[str, Any]:
        """Return the result of one fault; `left` are the remaining ranks, which must detect it."""
        await self._until(lambda engines: self._of_group(engines)["num_inflight"] > 0, owner)
        before = self._of_group(await self._engines(owner))
        told, num_answers = [host.told_lost() for host in self.hosts], len(self._answers)
        began_s = time.monotonic()
        happening = asyncio.create_task(happen())
        noticed: dict[str, float] = {}
        async with asyncio.timeout(START_S):
            while len(noticed) < len(left):
                for rank in left:
                    if self.hosts[rank].told_lost() > told[rank]:
                        noticed.setdefault(f"rank {rank}", round(time.monotonic() - began_s, 2))
                await asyncio.sleep(0.05)
        await happening
        was = before["load"]["engine_id"]
        await self._until(lambda engines: _is_back(self._of_group(engines), was), owner)
        back_s = time.monotonic() - began_s
        await self._until(lambda engines: self._of_group(engines)["load"]["output_tokens_total"] > 0, owner)
        return {
            "noticed_s": noticed,
            "open_at_the_group": before["num_inflight"],
            "back_s": round(back_s, 1),
            "answered_meanwhile": len(self._answers) - num_answers,
            "load_average": os.getloadavg()[0],
        }

    async def _cut(self) -> None:
        with self._wires.cut(*HOSTS):
            await asyncio.sleep(CUT_S)

    async def _kill(self, rank: int) -> None:
        self.hosts[rank].rank().kill()

    async def _ask(self, key: str, client: int) -> None:
        """Send one request after the other."""
        while not self._stopping:
            number = len(self._answers)
            body: dict[str, Any] = {
                "model": "model",
                "prompt": f"Client {client}, request {number}: what is 17 + {number}?",
            }
            body |= {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            answer = await self._client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
            tokens = answer.json()["usage"]["completion_tokens"] if answer.status_code == 200 else 0
            self._answers.append({"status": answer.status_code, "tokens": tokens})

    async def _engines(self, owner: dict[str, str]) -> list[dict[str, Any]]:
        engines: list[dict[str, Any]] = (await self._client.get("/admin/v1/engines", headers=owner)).json()["data"]
        return engines

    def _of_group(self, engines: list[dict[str, Any]]) -> dict[str, Any]:
        return next(one for one in engines if one["address"] == self._group)

    async def _until(self, is_so: Any, owner: dict[str, str]) -> None:
        async with asyncio.timeout(START_S):
            while not is_so(await self._engines(owner)):  # noqa: ASYNC110 - engines announce nothing
                await asyncio.sleep(0.1)


def _is_back(engine: dict[str, Any], was: str) -> bool:
    return engine["healthy"] and engine["load"] is not None and engine["load"]["engine_id"] != was


def _torchrun(number: int, first: str) -> list[str]:
    words = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"]
    return [*words, "--master-addr", first, "--master-port", str(MASTER_PORT)]


def _deepspeed(number: int, first: str, hostfile: Path) -> list[str]:
    words = ["-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), "--no_ssh", "--node_rank", str(number)]
    return [*words, "--master_addr", first, "--master_port", str(MASTER_PORT), "--no_local_rank"]


def _value(line: str) -> int:
    return int(float(line.rsplit(" ", 1)[1]))


if __name__ == "__main__":
    main()
