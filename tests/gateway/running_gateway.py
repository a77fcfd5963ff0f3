"""A whole gateway on a loopback port: real server, real store, real keys, and engines scripted in the same process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from openai.types import Batch
from sqlalchemy import ColumnElement

from moiety_platform.auth.bootstrap import BootstrapResult, ensure_bootstrap
from moiety_platform.backoff import Backoff
from moiety_platform.bootstrap.composition import AssembledGateway, assembled
from moiety_platform.bootstrap.engine_waker import OpenScaler, open_scaler
from moiety_platform.bootstrap.overrides import Overrides
from moiety_platform.classes.schemas import NewClass
from moiety_platform.classes.service import create_class, load_classes
from moiety_platform.clock import Clock, SystemClock
from moiety_platform.db.base import Base
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.engine_client.base import EngineClient
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.files.store import Now
from moiety_platform.listening import bind
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.settings import SECTION, GatewaySettings
from moiety_platform.traces.sampling import SamplingTerms
from moiety_platform.traces.tracing import Sender
from moiety_platform.usage.row import UsageRow
from moiety_wire.classes import SHIPPED

PEPPER = b"a pepper that is long enough for tests"
DEADLINE_S = 60.0  # generous: the machine may be busy
ALL = SamplingTerms(rate=1.0, max_per_s=1_000_000)


class RowList:
    """Usage rows in memory, and a way to wait for them."""

    def __init__(self) -> None:
        self.rows: list[UsageRow] = []
        self._arrived = asyncio.Event()

    def opened(self, row: UsageRow) -> None:
        """Ignore a request that begins."""

    def record(self, row: UsageRow, when_stored: Callable[[], None] | None = None) -> None:
        self.rows.append(row)
        if when_stored is not None:
            when_stored()
        self._arrived.set()

    async def wait_for(self, count: int) -> list[UsageRow]:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.rows) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.rows


class StoreClock:
    """The database's clock, which a test can advance."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def __call__(self) -> ColumnElement[int]:
        return now_ms() + self.ahead_ms


@dataclass(eq=False)
class RunningGateway:
    """A gateway that listens, with its keys, its engines, its usage rows and its parts."""

    url: str
    keys: BootstrapResult
    engines: Sequence[EngineClient]
    rows: RowList
    store_clock: StoreClock
    assembled: AssembledGateway

    def __post_init__(self) -> None:
        self.key, self.admin_key = self.keys.tenant_key, self.keys.admin_key
        self.fakes = [engine for engine in self.engines if isinstance(engine, FakeEngineClient)]
        self.of = {engine.card.model: engine for engine in self.fakes}
        self.client = AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=DEADLINE_S)
        services = self.assembled.services
        self.metrics, self.replicas = services.metrics, services.replicas
        self.responses, self.background = services.responses, services.background
        self.database, self.objects = self.assembled.database, self.assembled.objects
        self.stored_usage, self.retention = self.assembled.stored_usage, self.assembled.retention
        self.live, self.server = self.assembled.live, self.assembled.server
        self.stop = self.server.request_exit

    @property
    def engine(self) -> FakeEngineClient:
        """The first of the scripted engines."""
        return self.fakes[0]

    @cached_property
    def anthropic(self) -> AsyncAnthropic:
        """Anthropic's client, which the test closes."""
        return AsyncAnthropic(base_url=self.url, api_key=self.key, max_retries=0, timeout=DEADLINE_S)

    def forget_keys(self) -> None:
        """Look the tenant's key up again at its next use."""
        self.assembled.services.authenticator.forget(self.keys.tenant_key.removeprefix("mty_").partition(".")[0])

    async def admin(self, method: str, path: str, body: Mapping[str, Any] | None = None, expect: int = 200) -> Any:
        """Send a request to the admin API; return the decoded answer. Its status must be `expect`."""
        data = b"" if body is None else json.dumps(body).encode()
        status, _, answer = await self.request(method, f"/admin/v1{path}", data, self.admin_key)
        assert status == expect, answer
        return json.loads(answer)

    async def new_tenant_key(self) -> str:
        """Return a key of a new tenant."""
        made: dict[str, Any] = {}
        for path, parent in (("tenants", None), ("projects", "tenant_id"), ("keys", "project_id")):
            fields = {"name": path} if parent is None else {"name": path, parent: made["id"]}
            made = await self.admin("POST", f"/{path}", fields, expect=201)
        return str(made["secret"])

    async def run_batch(self, lines: bytes) -> Batch:
        """Upload lines of chats as a batch of OpenAI's API, and wait until it is completed."""
        file = await self.client.files.create(file=("lines.jsonl", lines), purpose="batch")
        batch = await self.client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        async with asyncio.timeout(DEADLINE_S):
            while batch.status != "completed":
                await asyncio.sleep(0.02)
                batch = await self.client.batches.retrieve(batch.id)
        return batch

    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    @staticmethod
    def prompt_tokens(text: str) -> int:
        """Return the number of prompt tokens of one user message."""
        return len(f"<|user|>{text}\n<|assistant|>".encode())

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    async def post(
        self,
        path: str,
        body: bytes | Mapping[str, Any],
        key: str | None = None,
        headers: Mapping[str, str | None] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """One POST of raw bytes on its own connection: (status, headers, body)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, data, key, headers)

    async def request(
        self,
        method: str,
        path: str,
        data: bytes = b"",
        key: str | None = None,
        headers: Mapping[str, str | None] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        reader, writer = await asyncio.open_connection(*self.address)
        fields: dict[str, str | None] = {"Host": "test", "Content-Length": str(len(data)), "Connection": "close"}
        fields["Authorization"] = f"Bearer {key or self.key}"
        fields.update(headers or {})
        head = (
            f"{method} {path} HTTP/1.1\r\n"
            + "".join(f"{k}: {v}\r\n" for k, v in fields.items() if v is not None)
            + "\r\n"
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                writer.write(head.encode() + data)
                answer = await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()
        top, _, rest = answer.partition(b"\r\n\r\n")
        lines = top.decode().split("\r\n")
        got = dict(line.split(": ", 1) for line in lines[1:])
        if got.get("transfer-encoding") == "chunked":
            rest = _unchunk(rest)
        return int(lines[0].split(" ")[1]), got, rest


def _unchunk(data: bytes) -> bytes:
    whole = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        count = int(size, 16)
        whole, data = whole + data[:count], data[count + 2 :]
    return whole


class StartGateway(Protocol):
    """`async with start_gateway(engines, **settings) as gateway`."""

    def __call__(
        self, engines: Sequence[EngineClient], sender: Sender | None = None, **settings: Any
    ) -> AbstractAsyncContextManager[RunningGateway]: ...


StartOver = Callable[..., AbstractAsyncContextManager[RunningGateway]]


async def make_store(database: Database, clock: Clock) -> BootstrapResult:
    """Create tables, the shipped classes and the first keys; return the keys."""
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with database.write() as session:
        for service in SHIPPED if not await load_classes(session) else ():
            await create_class(session, NewClass.of(service))
    keys = await ensure_bootstrap(database, PEPPER, clock, reissue=True)
    assert keys is not None
    return keys


@dataclass(frozen=True)
class NewStore:
    """The file of a store that was just created, and its keys."""

    file: bytes
    keys: BootstrapResult


_new_stores: list[NewStore] = []  # the first that this process made, if any


async def keys_of(path: Path, clock: Clock) -> BootstrapResult:
    """Return the first keys of the store in that file. All new stores are alike, so only the first one is created."""
    is_new = not path.exists()  # noqa: ASYNC240
    if _new_stores and is_new:
        path.write_bytes(_new_stores[0].file)  # noqa: ASYNC240
        return _new_stores[0].keys
    database = Database.open(f"sqlite:///{path}")
    keys = await make_store(database, clock)
    await database.close()
    if is_new:
        _new_stores.append(NewStore(path.read_bytes(), keys))  # noqa: ASYNC240
    return keys


@asynccontextmanager
async def run_gateway(
    tmp_path: Path,
    engines: Sequence[EngineClient],
    sender: Sender | None = None,
    *,
    sampling: SamplingTerms = ALL,
    stores_usage: bool = False,
    beside: RunningGateway | None = None,
    now: Now | None = None,
    breaker_clock: Clock | None = None,
    migrated_url: str | None = None,
    open_scaler: OpenScaler = open_scaler,
    **settings: Any,
) -> AsyncIterator[RunningGateway]:
    """Run a gateway of these engines.

    With `stores_usage` usage rows go to the store, as they do outside of tests; else they stay in a list. With
    `beside`, on the database of that gateway; with `migrated_url`, on that empty, migrated database. `now` is the
    database's clock, `breaker_clock` that of the engines' circuit breakers. Spans of requests that `sampling` keeps
    go to the `sender`.
    """
    clock, rows, store_clock = SystemClock(), RowList(), StoreClock()
    url = migrated_url or f"sqlite:///{tmp_path / 'store.db'}"
    database = Database.open(url)
    if migrated_url is None:
        keys = beside.keys if beside else await keys_of(tmp_path / "store.db", clock)
    else:
        keys = await make_store(database, clock)
    chosen = GatewaySettings(
        **{
            **{"data_dir": tmp_path, "database_url": url, "traces_database_url": url, "key_pepper": PEPPER.decode()},
            **{"trace_sample_rate": sampling.rate, "trace_sample_rates": dict(sampling.rates)},
            **{"trace_first_per_s": sampling.first_per_s, "trace_max_per_s": sampling.max_per_s},
            **{"drain_s": 2, "failover_wait_s": 0.1, **settings},
        }
    )
    overrides = Overrides(
        clock=clock,
        breaker_clock=breaker_clock,
        now=now or store_clock,
        engines=engines,
        span_senders=() if sender is None else (sender,),
        usage=None if stores_usage else rows,
        database=database,
        batch_poll_s=0.4,
        batch_backoff=Backoff(0.02),
        open_scaler=open_scaler,
    )
    source = SettingsSource.open(None, SECTION, lambda: chosen, settings)
    started = asyncio.Event()
    try:
        async with assembled(source, overrides, on_started=started.set) as gateway:
            listener = bind("127.0.0.1", 0)
            task = asyncio.create_task(gateway.server.serve([listener]))
            await started.wait()
            store, objects = gateway.services.store, gateway.services.objects
            while store is not None and await store.why_not_ready():  # which a busy machine makes late
                pass
            while objects is not None and await objects.why_not_ready() == objects.silence:
                pass
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            running = RunningGateway(address, keys, engines, rows, store_clock, gateway)
            try:
                yield running
            finally:
                await running.client.close()
                gateway.server.request_exit()
                await task
    finally:
        await database.close()
