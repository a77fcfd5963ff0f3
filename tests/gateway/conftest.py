"""A whole gateway on a loopback port: real server, real store, real keys, and engines scripted in the same process."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import structlog
import tokenizers
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from tests.parsed_once import parse_handlers_once

from moiety_platform.administration.router import admin_router
from moiety_platform.app import Services, create_app, create_pipeline
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.bootstrap import ensure_bootstrap
from moiety_platform.backoff import Backoff
from moiety_platform.batches.assembly import Batches
from moiety_platform.classes.cache import ClassCache
from moiety_platform.classes.schemas import NewClass
from moiety_platform.classes.service import create_class, load_classes
from moiety_platform.clock import SystemClock
from moiety_platform.connections import ConnectionLimits
from moiety_platform.controllers import with_services
from moiety_platform.db.base import Base
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.experts.controller import ExpertController
from moiety_platform.experts.service import ExpertService
from moiety_platform.gateway import GatewayServer
from moiety_platform.idempotency.key_store_client import IdempotencyKeys, KeepingLimits
from moiety_platform.idempotency.store import KeyStore
from moiety_platform.inference.request_recorder import RequestRecorder
from moiety_platform.listening import bind
from moiety_platform.live_settings import LiveSettings
from moiety_platform.logs import configure_logging
from moiety_platform.metrics import Metrics, RetentionMetrics, SpeculativePrefillMetrics
from moiety_platform.object_storage.readiness import ObjectStoreReadiness
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.prices.cache import PriceCache
from moiety_platform.quota.keeper import QuotaKeeper
from moiety_platform.quota.store import LeaseStore
from moiety_platform.reloading.controller import SettingController
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.responses_api.keeper import ConversationLimits, ResponseKeeper
from moiety_platform.responses_api.store import ResponseStore
from moiety_platform.retention.jobs import retention_jobs_of
from moiety_platform.retention.service import RetentionService
from moiety_platform.routing.controller import EngineController
from moiety_platform.routing.replicas import Replicas
from moiety_platform.settings import SECTION, GatewaySettings
from moiety_platform.speculative_prefill.next_turn_prefill import NextTurnPrefill
from moiety_platform.tenant_deletion.controller import DeletionServices, TenantDeletionController
from moiety_platform.trace_metrics import TraceCollector
from moiety_platform.traces.sampling import SamplingTerms
from moiety_platform.traces.tracing import Tracing
from moiety_platform.usage.recorder import UsageRecorder
from moiety_platform.webhooks.addresses import AddressPolicy
from moiety_platform.webhooks.controller import WebhookController
from moiety_wire.classes import SHIPPED
from moiety_wire.messages import ModelCard

parse_handlers_once()

MODEL = "tiny"
PEPPER = b"a pepper that is long enough for tests"
DEADLINE_S = 60.0  # generous: the machine may be busy
ALL = SamplingTerms(rate=1.0, max_per_s=1_000_000)
TOOL_TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _tokenizer_json() -> str:
    """A tokenizer with one token a byte, and one that ends."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer.to_str()


def make_card(
    engine_id: str = "engine-1", model: str = MODEL, max_context_tokens: int = 512, embedding_width=0
) -> ModelCard:
    return ModelCard(
        engine_id=engine_id,
        model=model,
        family="scripted",
        tokenizer_json=_tokenizer_json(),
        chat_template=TEMPLATE,
        special_tokens={"eos_token": "<|end|>"},
        eos_token_ids=(256,),
        max_context_tokens=max_context_tokens,
        vocab_size=257,
        max_num_logprobs=20,
        created_unix_s=1_700_000_000,
        dtype="float32",
        device="none",
        embedding_width=embedding_width,
    )


class RowList:
    """Usage rows in memory, and a way to wait for them."""

    def __init__(self) -> None:
        self.rows = []
        self._arrived = asyncio.Event()

    def opened(self, row) -> None:
        """Only what ends is of interest here."""

    def record(self, row, when_stored=None) -> None:
        self.rows.append(row)
        if when_stored is not None:
            when_stored()
        self._arrived.set()

    async def wait_for(self, count: int):
        async with asyncio.timeout(DEADLINE_S):
            while len(self.rows) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.rows


class SpanList:
    """Takes spans into memory."""

    name = "list"
    num_sent = 0

    def __init__(self) -> None:
        self.spans = []
        self.dropped = Counter()

    def put(self, spans) -> None:
        self.spans += spans

    def close(self) -> None:
        """Nothing to send."""

    def named(self, name: str):
        return [span for span in self.spans if span.name == name]


class StoreClock:
    """The database's clock, which may be put ahead."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def __call__(self):
        return now_ms() + self.ahead_ms


class RunningGateway:
    """What tests hold of a gateway that listens."""

    def __init__(self, url: str, keys, engines, rows: RowList, metrics: Metrics) -> None:
        self.url = url
        self.keys = keys
        self.key = keys.tenant_key
        self.admin_key = keys.admin_key
        self.engines = engines
        self.engine = engines[0]
        self.rows = rows
        self.metrics = metrics
        self.client = AsyncOpenAI(base_url=f"{url}/v1", api_key=self.key, max_retries=0, timeout=DEADLINE_S)

    @staticmethod
    def prompt_tokens(text: str) -> int:
        """Of one user message."""
        return len(f"<|user|>{text}\n<|assistant|>".encode())

    @property
    def address(self):
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    async def post(self, path: str, body: bytes | dict, key: str | None = None, headers=None):
        """One POST of raw bytes on its own connection: (status, headers, body)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, data, key, headers)

    async def request(self, method: str, path: str, data: bytes = b"", key: str | None = None, headers=None):
        reader, writer = await asyncio.open_connection(*self.address)
        fields = {"Host": "test", "Content-Length": str(len(data)), "Connection": "close"}
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


async def make_store(database: Database, clock: SystemClock):
    """Tables, the shipped classes and the first keys, which are returned."""
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with database.write() as session:
        for service in SHIPPED if not await load_classes(session) else ():
            await create_class(session, NewClass.of(service))
    return await ensure_bootstrap(database, PEPPER, clock, reissue=True)


_new_store = {}  # what a store is when it was just made, and its keys


async def keys_of(path: Path, clock: SystemClock):
    """The first keys of the store in that file. One that is new is like every other, so only the first is made."""
    if _new_store and not path.exists():  # noqa: ASYNC240
        path.write_bytes(_new_store["file"])  # noqa: ASYNC240
        return _new_store["keys"]
    is_new = not path.exists()  # noqa: ASYNC240
    database = Database.open(f"sqlite:///{path}")
    keys = await make_store(database, clock)
    await database.close()
    if is_new:
        _new_store.update(file=path.read_bytes(), keys=keys)  # noqa: ASYNC240
    return keys


@asynccontextmanager
async def run_gateway(
    tmp_path,
    engines,
    sender=None,
    *,
    sampling=ALL,
    stores_usage=False,
    beside=None,
    now=None,
    breaker_clock=None,
    **settings,
):
    """With `stores_usage` usage rows go to the store, as they do outside of tests; else they stay in a list. With
    `beside`, on the database of that gateway. `now` is the database's clock, as far as
    Idempotency-Keys and kept responses go by it; `breaker_clock` is that of the engines' circuit breakers. Spans of
    requests that `sampling` keeps go to the `sender`."""
    clock, rows, metrics = SystemClock(), RowList(), Metrics()
    async with AsyncExitStack() as stack:
        store = tmp_path / "store.db"
        keys = beside.keys if beside else await keys_of(store, clock)
        database = Database.open(f"sqlite:///{store}")
        stack.push_async_callback(database.close)
        replicas = await stack.enter_async_context(Replicas(engines, breaker_clock))
        tracing = Tracing(sampling, () if sender is None else (sender,))
        metrics.registry.register(TraceCollector(tracing))
        authenticator = Authenticator(database, PEPPER, clock)
        classes, prices = ClassCache(database, clock), PriceCache(database, clock)
        if stores_usage:
            rows = UsageRecorder(database, tmp_path / "usage-journal")
            await rows.start()
            stack.push_async_callback(rows.stop)
        quotas = QuotaKeeper(database, LeaseStore("second" if beside else "first", 20.0), clock, ttl_s=20.0)
        await quotas.start()
        stack.push_async_callback(quotas.stop)
        chosen = GatewaySettings(**{"drain_s": 2, "failover_wait_s": 0.1, **settings})
        next_turn_prefill = await stack.enter_async_context(
            NextTurnPrefill(rows, quotas, SpeculativePrefillMetrics(metrics.registry), clock)
        )
        idempotency = IdempotencyKeys(database, KeyStore(now=now or now_ms), KeepingLimits.of(chosen))
        await idempotency.start()
        stack.push_async_callback(idempotency.stop)
        responses = ResponseKeeper(database, ConversationLimits.of(chosen), ResponseStore(now or now_ms))
        worker_id = f"worker-{secrets.token_hex(8)}"
        store_clock = StoreClock()
        objects = ObjectStore.open((tmp_path / "objects").as_uri())
        stack.push_async_callback(objects.close)
        objects_ready = ObjectStoreReadiness(database, objects)
        stack.push_async_callback(objects_ready.close)
        parts = (database, objects, authenticator, quotas, metrics, tracing, clock, chosen)
        batches = Batches(worker_id, *parts, poll_s=0.05, backoff=Backoff(0.02), now=store_clock)
        live, source = LiveSettings(chosen), SettingsSource.open(None, SECTION, lambda: chosen, settings)
        services = Services(
            authenticator=authenticator,
            usage=rows,
            replicas=replicas,
            classes=classes,
            prices=prices,
            metrics=metrics,
            tracing=tracing,
            clock=clock,
            recorder=RequestRecorder(rows, quotas, metrics, tracing, clock),
            idempotency=idempotency,
            responses=responses,
            admin_routes=[
                admin_router(
                    database,
                    authenticator,
                    classes,
                    prices,
                    quotas,
                    PEPPER,
                    clock,
                    more=[
                        with_services(EngineController, replicas=replicas),
                        with_services(ExpertController, experts=ExpertService(replicas, clock)),
                        with_services(WebhookController, reach=AddressPolicy()),
                        with_services(TenantDeletionController, deletion=DeletionServices(objects)),
                        with_services(SettingController, source=source, live=live, reloader=None),
                    ],
                )
            ],
            objects=objects_ready,
            batches=batches,
            live=live,
            next_turn_prefill=next_turn_prefill,
        )
        listener = bind("127.0.0.1", 0)
        started = asyncio.Event()
        pipeline = create_pipeline(chosen, services)
        app = create_app(chosen, services, pipeline)
        server = GatewayServer(app, chosen.drain_s, ConnectionLimits.of(chosen), started.set, batches.drain)
        server.followed_by(live)
        await stack.enter_async_context(batches.working(pipeline))
        task = asyncio.create_task(server.serve([listener]))
        await started.wait()
        running = RunningGateway(f"http://127.0.0.1:{listener.getsockname()[1]}", keys, engines, rows, metrics)
        running.stop = server.request_exit
        running.forget_keys = lambda: authenticator.forget(keys.tenant_key.removeprefix("mty_").partition(".")[0])
        running.database, running.responses, running.replicas = database, responses, replicas
        running.objects = objects
        running.store_clock, running.live, running.server = store_clock, live, server
        jobs = retention_jobs_of(chosen, database, objects, store_clock)
        running.retention = RetentionService(
            worker_id, database, jobs, RetentionMetrics(metrics.registry), interval_s=60, now=store_clock
        )
        running.num_connections = lambda: len(server.server_state.connections)
        try:
            yield running
        finally:
            await running.client.close()
            server.request_exit()
            await task


_logged = io.StringIO()


@pytest.fixture
def logged():
    """What the process logs, in JSON and as much of it as there can be. One stream for all tests of the process: a
    logger goes on writing to the first one that it was given."""
    _logged.seek(0)
    _logged.truncate()
    configure_logging("debug", "json", _logged)
    yield _logged
    structlog.reset_defaults()


@pytest.fixture
def spans() -> SpanList:
    return SpanList()


@pytest.fixture
def until():
    """`await until(condition)`: returns once it holds, fails after a deadline. For states that announce no change."""

    async def wait(condition) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - what is watched has no event
                await asyncio.sleep(0.002)

    return wait


@pytest.fixture
def card() -> ModelCard:
    return make_card()


@pytest.fixture(scope="session")
def any_card() -> ModelCard:
    return make_card()


@pytest.fixture
def new_card():
    return make_card


@pytest.fixture
def tool_card():
    """A card whose model is named for the family that its chat template is of; what marks its calls may be special
    tokens or other added ones."""

    def make(family: str, *, template: str = "", special=(), added=(), engine_id: str = "") -> ModelCard:
        card = make_card(engine_id or family, family, max_context_tokens=20_000)
        tokenizer = tokenizers.Tokenizer.from_str(card.tokenizer_json)
        tokenizer.add_special_tokens(list(special))
        tokenizer.add_tokens(list(added))
        return msgspec.structs.replace(
            card,
            chat_template=template or (TOOL_TEMPLATES / f"{family}.jinja").read_text(),
            tokenizer_json=tokenizer.to_str(),
            vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        )

    return make


@pytest.fixture
def thinking_card(tool_card):
    """A card whose model thinks before it answers, and can be told not to; its markers are tokens."""
    switch = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    template = (TOOL_TEMPLATES / "hermes.jinja").read_text() + switch
    return tool_card("hermes", template=template, added=("<think>", "</think>"))


@pytest.fixture
async def tool_gateway(start_gateway, tool_card):
    """A gateway with a model of each family that calls tools, in `of`, and Anthropic's client beside OpenAI's."""
    engines = {family: FakeEngineClient(tool_card(family)) for family in ("hermes", "llama", "mistral")}
    async with start_gateway(list(engines.values())) as running:
        running.of = engines
        running.anthropic = AsyncAnthropic(base_url=running.url, api_key=running.key, max_retries=0, timeout=DEADLINE_S)
        async with running.anthropic:
            yield running


@pytest.fixture
def start_gateway(tmp_path):
    """`async with start_gateway(engines, **settings) as gateway`."""

    def start(engines, sender=None, **settings):
        return run_gateway(tmp_path, engines, sender, **settings)

    return start


@pytest.fixture
async def gateway(start_gateway, card):
    async with start_gateway([FakeEngineClient(card)]) as running:
        yield running
