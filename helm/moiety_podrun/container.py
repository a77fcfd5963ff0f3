"""One container: a process in its pod's namespaces, with its probes and signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from moiety_podrun.images import PROGRAMS, image

LAUNCH = Path(__file__).with_name("launch.py")
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
DEFAULTS = {"periodSeconds": 10, "timeoutSeconds": 1, "failureThreshold": 3}


@dataclass(frozen=True, slots=True)
class Place:
    """Environment of a pod's containers: its namespace and address, its folder, the table of names, its volumes."""

    pod: str
    address: str
    folder: Path
    names: Path
    volumes: Mapping[str, Path]
    user: int
    group: int
    account: Path | None  # service account files, if the pod gets them


class Container:
    """Owner of a process and its log. The pod that watches it restarts it."""

    def __init__(self, spec: Mapping[str, Any], place: Place, variables: Mapping[str, str]) -> None:
        self.name: str = spec["name"]
        self.log = place.folder / f"{self.name}.log"
        self._spec, self._place = spec, place
        self._image = image(spec["image"])
        self._variables = {"PATH": self._image.path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
        self._ports = {port["name"]: port["containerPort"] for port in spec.get("ports", ())}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run the entry point with the arguments of the manifest."""
        words = [_filled(word, self._variables) for word in map(str, self._spec.get("args", ()))]
        self._process = self._run([*self._entry_point(), *words], self.log)

    async def ended(self) -> int:
        """Wait for the process; return its exit code."""
        assert self._process is not None, "it has been started"
        return await _end(self._process)

    @property
    def process_id(self) -> int | None:
        """The process id; None before the start."""
        return None if self._process is None else self._process.pid

    @property
    def stop_signal(self) -> signal.Signals:
        """The stop signal of its image."""
        return self._image.stop_signal

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to the process, as a runtime does; SIGKILL also ends all of its child processes."""
        if self._process is not None and self._process.poll() is None:
            send = os.killpg if number is signal.SIGKILL else os.kill
            with contextlib.suppress(ProcessLookupError):
                send(self._process.pid, number)

    async def passes(self, probe: str) -> bool:
        """Return whether the container passes this probe; without such a probe it passes."""
        terms = self._spec.get(f"{probe}Probe")
        if terms is None:
            return True
        limit = terms.get("timeoutSeconds", DEFAULTS["timeoutSeconds"])
        try:
            async with asyncio.timeout(limit):
                return await self._answers(terms, limit)
        except (OSError, TimeoutError, httpx.HTTPError):
            return False

    def terms(self, probe: str, name: str) -> int:
        """Return a number of a probe, or Kubernetes' default for it."""
        found: int = (self._spec.get(f"{probe}Probe") or {}).get(name, DEFAULTS[name])
        return found

    async def before_stop(self) -> None:
        """Run the preStop hook before the stop signal."""
        hook = self._spec.get("lifecycle", {}).get("preStop", {})
        if "sleep" in hook:
            await asyncio.sleep(hook["sleep"]["seconds"])

    def _entry_point(self) -> Sequence[str]:
        command = self._spec.get("command")
        return self._image.entry_point if command is None else [*PROGRAMS.get(command[0], command[:1]), *command[1:]]

    async def _answers(self, terms: Mapping[str, Any], limit: int) -> bool:
        if "httpGet" in terms:
            wanted = terms["httpGet"]
            url = f"http://{self._place.address}:{self._port(wanted['port'])}{wanted['path']}"
            async with httpx.AsyncClient(timeout=limit, trust_env=False) as client:
                return (await client.get(url)).status_code < httpx.codes.BAD_REQUEST
        if "grpc" in terms:
            return await _serves(f"{self._place.address}:{terms['grpc']['port']}", terms["grpc"].get("service", ""))
        if "tcpSocket" in terms:
            _, writer = await asyncio.open_connection(self._place.address, self._port(terms["tcpSocket"]["port"]))
            writer.close()
            return True
        process = self._run(terms["exec"]["command"], self._place.folder / f"{self.name}.probe.log")
        return await _end(process) == 0

    def _port(self, port: int | str) -> int:
        return self._ports[port] if isinstance(port, str) else port

    def _run(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        base = self._place.folder / "root"
        base.mkdir(exist_ok=True)
        mounts = [
            {
                "source": str(self._place.volumes[one["name"]]),
                "path": one["mountPath"],
                "read_only": one.get("readOnly", False),
            }
            for one in self._spec.get("volumeMounts", ())
        ]
        if self._place.account is not None:
            mounts.append({"source": str(self._place.account), "path": ACCOUNT, "read_only": True})
        spec = self._place.folder / f"{self.name}.{Path(command[0]).name}.json"
        document = {
            "folder": str(base), "mounts": mounts, "names": str(self._place.names), "command": list(command),
            "environment": self._variables, "user": self._place.user, "group": self._place.group,
            "needed": list(map(str, self._image.needed)),
        }  # fmt: skip
        spec.touch(mode=0o600)
        spec.write_text(json.dumps(document), encoding="utf-8")
        inside = ["ip", "netns", "exec", self._place.pod, "unshare", "--mount"]
        with log.open("ab") as output:
            return subprocess.Popen(
                [*inside, sys.executable, str(LAUNCH), str(spec)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip


async def _serves(address: str, service: str) -> bool:
    """Return whether a gRPC health check reports the service as serving. The messages have one field each."""
    name = service.encode()
    async with grpc.aio.insecure_channel(address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            return bool(await check(b"\x0a" + bytes([len(name)]) + name) == b"\x08\x01")
        except grpc.aio.AioRpcError:
            return False


def _filled(word: str, variables: Mapping[str, str]) -> str:
    """Return the word with each $(NAME) of a known variable replaced, as Kubernetes does."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), word)


async def _end(process: subprocess.Popen[bytes]) -> int:
    """Wait for the exit code and return it, without a thread, of which each process would need one."""
    if process.poll() is None:
        ended = asyncio.Event()
        descriptor = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
    return process.wait()
