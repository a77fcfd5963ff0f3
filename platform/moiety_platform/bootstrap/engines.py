"""Connections to the engines of the settings, which follow changes of the settings file and of DNS names.

An engine that was removed from the file serves on, for a bounded time, until another engine of its model is available.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Self

import structlog
import zmq

from moiety_platform.adapters.contents import AdapterContents
from moiety_platform.clock import Clock
from moiety_platform.engine_addresses import ExternalAddress, ExternalKind, identity, is_external, is_name
from moiety_platform.engine_client.base import EngineClient
from moiety_platform.engine_client.curve import CurveKeys
from moiety_platform.engine_client.session_timer import SessionTimer
from moiety_platform.engine_client.transport import ZmqEngineClient
from moiety_platform.external_engines.client import ExternalEngineClient
from moiety_platform.live_settings import CannotApplySetting, PreparedChange
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.routing.discovery import DnsWatch
from moiety_platform.routing.replicas import Replicas
from moiety_platform.routing.service_exchange import ServiceExchange
from moiety_platform.settings import GatewaySettings
from moiety_platform.usage.metering import MeterReader
from moiety_text.errors import TextError

POLL_INTERVAL_S = 0.5
LEAVE_S = 60.0  # longest time for which a removed engine waits for another one of its model

log = structlog.get_logger(__name__)


class CannotUseEngine(CannotApplySetting):
    """An engine's address, or a file that it names, is missing or unusable; the message says which."""


@dataclass(eq=False, repr=False)
class Engines:
    """Owner of the engine connections. Entered before the first request and exited after the last.

    Creating it creates the clients; `more` are engines that no setting names. Raises CannotUseEngine.
    """

    settings: GatewaySettings
    clock: Clock
    replica_id: str
    meter: MeterReader
    adapters: AdapterContents
    _: KW_ONLY
    more: Sequence[EngineClient] = ()
    breaker_clock: Clock | None = None

    def __post_init__(self) -> None:
        settings = self.settings
        self._curve = curve_of(settings)
        self._timer = SessionTimer()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            clients = [self._client_of(one, settings) for one in settings.engines if not is_name(one)]
            self.replicas = Replicas([*self.more, *clients], self.breaker_clock or self.clock)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._watches = {name: self._watch_of(name) for name in settings.engines if is_name(name)}
        self._unwanted: dict[str, float] = {}  # identity → latest time until which it still gets requests
        self._exchange = ServiceExchange(self.replicas.connected)
        self._leaving = PeriodicTask("engines-left", self._close_unused_engines, POLL_INTERVAL_S)

    async def __aenter__(self) -> Self:
        await self.replicas.__aenter__()
        for watch in self._watches.values():
            watch.begin()
        self._leaving.start()
        self._exchange.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._exchange.stop()
            await self._leaving.cancel()
            for watch in self._watches.values():
                await watch.stop()
            await self.replicas.__aexit__(None, None, None)
        finally:
            self._context.destroy(linger=0)

    async def follow(self, settings: GatewaySettings) -> PreparedChange:
        """Connect to new engines before they get requests. Raises CannotUseEngine."""
        before, after = self.settings.engines, settings.engines
        clients: list[EngineClient] = []

        async def undo() -> None:
            for client in clients:
                await client.close()

        try:
            keys = {
                address: api_key_of(ExternalAddress.parse(address), settings) for address in external_engine_of(after)
            }
            new = [address for address in after if address not in before]
            clients.extend(self._client_of(address, settings) for address in new if not is_name(address))
            watches = {name: self._watch_of(name) for name in new if is_name(name) and name not in self._watches}
            for client in clients:
                await self.replicas.start(client)
        except zmq.ZMQError as exc:
            await undo()
            raise CannotUseEngine(f"cannot connect to an engine: {exc}; check the addresses in engines") from exc
        except BaseException:
            await undo()
            raise

        def commit() -> None:
            self.settings = settings
            for client in clients:
                self.replicas.admit(client)
                for watch in self._watches.values():
                    watch.release_engine(client.address)
            now_s = self.clock.monotonic()
            kept = {identity(address) for address in after}
            gone = [address for address in before if identity(address) not in kept]
            self._unwanted = {one: until_s for one, until_s in self._unwanted.items() if one not in kept}
            self._unwanted |= {identity(address): now_s + LEAVE_S for address in gone}
            for name, watch in watches.items():
                self._watches[name] = watch
                watch.begin()
            for address, key in keys.items():
                found = self.replicas.find(ExternalAddress.parse(address).name)
                if isinstance(found, ExternalEngineClient):
                    found.use_key(key)

        return PreparedChange(commit, undo)

    async def _close_unused_engines(self) -> None:
        """Retire removed engines once others serve their model; close their connections once they are idle."""
        now_s = self.clock.monotonic()
        for name, until_s in list(self._unwanted.items()):
            watch = self._watches.get(name)
            ours = [name] if watch is None else watch.addresses
            if now_s < until_s and any(self._is_needed(one) for one in ours):
                continue
            del self._unwanted[name]
            if watch is not None:
                del self._watches[name]
                await watch.leave({identity(address) for address in self.settings.engines})
            elif not any(
                other.take_over_engine(name) for at, other in self._watches.items() if at not in self._unwanted
            ):
                self.replicas.retire(name)
        await self.replicas.close_retired()

    def _is_needed(self, address: str) -> bool:
        """Return whether no other remaining engine serves its model."""
        leaving = set(self._unwanted).union(*(self._watches[one].addresses for one in self._unwanted if is_name(one)))
        states = {state.address: state for state in self.replicas.states() if state.healthy and not state.draining}
        mine = states.get(address)
        if mine is None or mine.card is None:
            return False
        others = [state.card for at, state in states.items() if at not in leaving and state.card is not None]
        return all(card.model != mine.card.model for card in others)

    def _watch_of(self, name: str) -> DnsWatch:
        return DnsWatch(name, self.replicas, lambda address: self._client_of(address, self.settings))

    def _client_of(self, address: str, settings: GatewaySettings) -> EngineClient:
        """Return a new client for the address. Raises CannotUseEngine."""
        if is_external(address):
            return self._external_client(ExternalAddress.parse(address), settings)
        return ZmqEngineClient(
            address,
            self._context,
            self.clock,
            self._curve,
            replica_id=self.replica_id,
            on_unacknowledged=self.meter.take,
            adapters=self.adapters.parts,
            timer=self._timer,
        )

    def _external_client(self, address: ExternalAddress, settings: GatewaySettings) -> ExternalEngineClient:
        try:
            return ExternalEngineClient(address, self.clock, api_key_of(address, settings))
        except (TextError, OSError, UnicodeDecodeError) as exc:
            raise CannotUseEngine(f"engine {address.name}: {exc}") from exc


def api_key_of(address: ExternalAddress, settings: GatewaySettings) -> str | None:
    """Return the API key of an external engine. Raises CannotUseEngine."""
    if address.key_env is not None:
        key = os.environ.get(address.key_env)
        if not key:
            raise CannotUseEngine(
                f"engine {address.name}: the environment variable {address.key_env} with its API key is not set"
            )
        return key
    if address.key_file is None:
        if address.kind is ExternalKind.HOSTED:
            return None  # the common key is that of one's own servers, and is not shown to a provider
        return settings.external_engine_api_key.get_secret_value() if settings.external_engine_api_key else None
    try:
        return address.key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise CannotUseEngine(f"engine {address.name}: {exc}") from exc


def curve_of(settings: GatewaySettings) -> CurveKeys | None:
    """Return the CURVE keys, or None where connections are not encrypted."""
    if not (settings.curve_server_key and settings.curve_public_key and settings.curve_secret_key):
        return None
    secret = settings.curve_secret_key.get_secret_value()
    return CurveKeys(settings.curve_server_key.encode(), settings.curve_public_key.encode(), secret.encode())


def external_engine_of(engines: Iterable[str]) -> list[str]:
    return [address for address in engines if is_external(address)]


def key_files(settings: GatewaySettings) -> list[Path]:
    """Return the files with the API keys of external engines."""
    found = [ExternalAddress.parse(address).key_file for address in external_engine_of(settings.engines)]
    return [path for path in found if path is not None]
