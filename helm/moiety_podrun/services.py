"""Services: names for the addresses of ready pods, and for some an address that forwards connections to them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from moiety_podrun.network import Network
from moiety_podrun.pod import Pod

CHUNK = 65_536

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Services:
    """Owner of the Services' addresses and of the table of names that every pod sees.

    The table is rewritten when pods start or stop.
    """

    def __init__(self, network: Network, names: Path, namespace: str, pods: Callable[[], Iterable[Pod]]) -> None:
        self._network, self._names, self._namespace, self._pods = network, names, namespace, pods
        self._turn = itertools.count()
        self._known: dict[str, Mapping[str, Any]] = {}
        self._addresses: dict[str, str] = {}
        self._pod_names: dict[str, str] = {}
        self._servers: list[asyncio.Server] = []
        names.mkdir(parents=True, exist_ok=True)
        self.tell_names()

    def name_pod(self, name: str, address: str) -> None:
        """Name one pod, ready or not, such as the leader of a group."""
        self._pod_names[name] = address
        self.tell_names()

    async def add(self, service: Mapping[str, Any]) -> None:
        """Serve a Service from now on; a known one gets its new terms."""
        name, spec = service["metadata"]["name"], service["spec"]
        new = name not in self._known
        self._known[name] = spec
        if new and spec.get("clusterIP") != "None":
            self._addresses[name] = self._network.new_service_address()
            for port in spec["ports"]:
                answer = self._passing(name, port["name"])
                self._servers.append(await asyncio.start_server(answer, self._addresses[name], port["port"]))
        self.tell_names()

    def tell_names(self) -> None:
        """Rewrite the table of names atomically."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._pod_names.items())]
        for name in self._known:
            own = self._addresses.get(name)
            for address in [own] if own else [pod.peer.address for pod in self.ready(name)]:
                full = f"{name}.{self._namespace}.svc"
                lines.append(f"{address} {name} {name}.{self._namespace} {full} {full}.cluster.local")
        draft = self._names / "hosts.draft"
        draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
        draft.replace(self._names / "hosts")

    def ready(self, name: str) -> list[Pod]:
        """Return the pods behind a Service that accept connections now."""
        wanted = self._known[name]["selector"].items()
        return [pod for pod in self._pods() if pod.ready and wanted <= pod.labels.items()]

    def address(self, name: str, port: int | None = None) -> tuple[str, int]:
        """Return where a Service with its own address accepts connections."""
        return self._addresses[name], port or self._known[name]["ports"][0]["port"]

    async def close(self) -> None:
        """Stop accepting connections."""
        for server in self._servers:
            server.close()

    def _passing(self, name: str, port_name: str) -> Answer:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ready = self.ready(name)
            port = next(one for one in self._known[name]["ports"] if one["name"] == port_name)["targetPort"]
            source = writer.get_extra_info("peername")[0]
            if not ready:
                writer.transport.abort()  # like a Service without endpoints
                return
            pod = ready[next(self._turn) % len(ready)]
            number = pod.peer.ports[port]
            if not self._network.may_connect(source, pod.peer, number):
                writer.transport.abort()
                return
            await join(reader, writer, pod.peer.address, number)

        return answer


async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    """Forward data in both directions until both have ended; an abort is forwarded as an abort."""
    try:
        other_reader, other_writer = await asyncio.open_connection(host, port)
    except OSError:
        writer.transport.abort()
        return
    await pump_both(reader, writer, other_reader, other_writer)


async def pump_both(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> None:
    """Forward data in both directions until both have ended."""
    try:
        await asyncio.gather(_pump(reader, other_writer), _pump(other_reader, writer))
    finally:
        writer.close()
        other_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(CHUNK):
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()
    except (OSError, RuntimeError):  # the other end has closed already
        writer.transport.abort()
