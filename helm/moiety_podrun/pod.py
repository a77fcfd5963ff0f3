"""One pod: its init containers in sequence, then its container with probes, restarts and an orderly stop."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moiety_podrun.container import Container, Place
from moiety_podrun.errors import Failed, NotPossible
from moiety_podrun.network import Network
from moiety_podrun.policies import Peer
from moiety_podrun.sources import Sources
from moiety_podrun.volumes import make_volumes

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0  # before a container that has ended is restarted
LOG_LINES = 40
ASSIGNED_USER = 1_000_650_000  # of a pod that names none, as OpenShift assigns one without an entry in /etc/passwd


class Pod:
    """Owner of a pod's namespace and processes. `on_change` is called when its readiness changes."""

    def __init__(
        self,
        name: str,
        template: Mapping[str, Any],
        claims: Mapping[str, Path],
        network: Network,
        sources: Sources,
        names: Path,
        on_change: Callable[[], None],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.labels = name, template["metadata"]["labels"]
        self.ready = False
        self.restarts = 0
        self._spec, self._network, self._on_change = template["spec"], network, on_change
        if any(one.get("restartPolicy") == "Always" for one in self._spec.get("initContainers", ())):
            raise NotPossible(f"the pod {name} has sidecars, which only a cluster runs: choose values without them")
        ports = {
            port["name"]: port["containerPort"] for one in self._spec["containers"] for port in one.get("ports", ())
        }
        self.peer: Peer = network.add(name, self.labels, ports)
        self.folder = sources.folder / "pods" / name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        security = self._spec["securityContext"]
        volumes = make_volumes(self._spec, claims, self.folder / "volumes", sources, ASSIGNED_USER)
        user, group = (security.get(name, ASSIGNED_USER) for name in ("runAsUser", "runAsGroup"))
        is_told = self._spec["automountServiceAccountToken"]
        account = sources.api.folder if is_told else None
        place = Place(name, self.peer.address, self.folder, names, volumes, user, group, account)
        extra = {**(variables or {}), **(sources.api.environment if is_told else {})}
        self._containers, self._first = (
            [Container(one, place, extra | sources.variables(one)) for one in self._spec.get(key, ())]
            for key in ("containers", "initContainers")
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def part(self) -> str:
        """The part of the release that the pod belongs to."""
        return str(self.labels["app.kubernetes.io/component"])

    @property
    def process(self) -> int | None:
        """Return its container's process, through which its namespaces can be entered."""
        return self._containers[0].process_id

    async def run_to_end(self) -> None:
        """Run to completion, as a Job's pod. Raises Failed with the log of the failure."""
        try:
            for container in (*self._first, *self._containers):
                await self._run_once(container)
        finally:
            self._network.remove(self.name)

    def start(self) -> None:
        """Start as a long-running pod; it becomes ready later."""
        self._task = asyncio.create_task(self._live(), name=self.name)

    async def until_ready(self, limit_s: float) -> None:
        """Wait until the pod is ready. Raises Failed, with the end of the log, after `limit_s`."""
        until = time.monotonic() + limit_s
        while not self.ready:
            if self._task is not None and self._task.done():
                await self._task
            if time.monotonic() > until:
                raise Failed(f"the pod {self.name} is not ready after {limit_s:.0f} s\n{self._logs()}")
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        """Remove the pod from Services, run its hook, send the stop signal, and SIGKILL after its grace period."""
        self._set_ready(False)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        (container,) = self._containers
        ended = asyncio.create_task(container.ended())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._spec.get("terminationGracePeriodSeconds", 30)):
                await container.before_stop()
                container.tell(container.stop_signal)
                await asyncio.shield(ended)
        container.tell(signal.SIGKILL)
        await ended
        self._network.remove(self.name)

    def kill(self) -> None:
        """Kill the container's processes, as a failure of the machine would."""
        for container in self._containers:
            container.tell(signal.SIGKILL)

    async def _live(self) -> None:
        for container in self._first:
            await self._run_once(container)
        (container,) = self._containers
        pause = FIRST_PAUSE_S
        while True:
            container.start()
            watch = asyncio.create_task(self._watch(container))
            try:
                await container.ended()
            finally:
                watch.cancel()
                self._set_ready(False)
            self.restarts += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _watch(self, container: Container) -> None:
        """Run the three probes as Kubernetes does: the others wait until the first has passed."""
        for _ in range(container.terms("startup", "failureThreshold")):
            if await container.passes("startup"):
                break
            await asyncio.sleep(container.terms("startup", "periodSeconds"))
        else:
            container.tell(signal.SIGKILL)
            return
        await asyncio.gather(self._ask_readiness(container), self._ask_liveness(container))

    async def _ask_readiness(self, container: Container) -> None:
        missed = 0
        while True:
            missed = 0 if await container.passes("readiness") else missed + 1
            if missed == 0 or missed >= container.terms("readiness", "failureThreshold"):
                self._set_ready(missed == 0)
            await asyncio.sleep(container.terms("readiness", "periodSeconds") if self.ready else 1)

    async def _ask_liveness(self, container: Container) -> None:
        missed = 0
        while missed < container.terms("liveness", "failureThreshold"):
            await asyncio.sleep(container.terms("liveness", "periodSeconds"))
            missed = 0 if await container.passes("liveness") else missed + 1
        container.tell(signal.SIGKILL)

    async def _run_once(self, container: Container) -> None:
        container.start()
        try:
            code = await container.ended()
        except asyncio.CancelledError:
            container.tell(signal.SIGKILL)
            raise
        if code:
            raise Failed(f"{container.name} of {self.name} ended with {code}\n{self._logs()}")

    def _set_ready(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            self._on_change()

    def _logs(self) -> str:
        lines = [line for one in (*self._first, *self._containers) if one.log.exists() for line in _tail(one.log)]
        return "\n".join(lines)


def _tail(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
