"""A whole gateway on a loopback port: real server, real store, real keys, and engines scripted in the same process."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest
import structlog
import tokenizers
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from openai.types import Batch
from sqlalchemy import ColumnElement
from tests.framework_caches import share_framework_caches

from moiety_platform.auth.bootstrap import BootstrapResult, ensure_bootstrap
from moiety_platform.backoff import Backoff
from moiety_platform.bootstrap.composition import AssembledGateway, Overrides, assembled
from moiety_platform.classes.schemas import NewClass
from moiety_platform.classes.service import create_class, load_classes
from moiety_platform.clock import Clock, SystemClock
from moiety_platform.db.base import Base
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.engine_client.base import EngineClient
from moiety_platform.engine_client.fake import FakeEngineClient, Script
from moiety_platform.files.store import Now
from moiety_platform.listening import bind
from moiety_platform.logs import configure_logging
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.settings import SECTION, GatewaySettings
from moiety_platform.traces.sampling import SamplingTerms
from moiety_platform.traces.span import Span
from moiety_platform.traces.tracing import Sender
from moiety_platform.usage.row import UsageRow
from moiety_wire.classes import SHIPPED
from moiety_wire.messages import Failed, ModelCard

share_framework_caches()

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
    engine_id: str = "engine-1", model: str = MODEL, max_context_tokens: int = 512, embedding_width: int = 0
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


def always(failed: Failed) -> Script:
    """A script by which every request fails like this."""
    return lambda submit: msgspec.structs.replace(failed, request_id=submit.request_id)


def write_tokenizer(folder: Path, card: ModelCard) -> None:
    """Write the files that the tokenizer and the chat template of an external engine are read from."""
    (folder / "tokenizer.json").write_text(card.tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text(card.chat_template)


class RowList:
    """Usage rows in memory, and a way to wait for them."""

    def __init__(self) -> None:
        self.rows: list[UsageRow] = []
        self._arrived = asyncio.Event()

    def opened(self, row: UsageRow) -> None:
        """Only what ends is of interest here."""

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


class SpanList:
    """Takes spans into memory."""

    name = "list"
    num_sent = 0

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.dropped: Counter[str] = Counter()

    def put(self, spans: Iterable[Span]) -> None:
        self.spans += spans

    def close(self) -> None:
        """Nothing to send."""

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


class StoreClock:
    """The database's clock, which may be put ahead."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def __call__(self) -> ColumnElement[int]:
        return now_ms() + self.ahead_ms


@contextmanager
def unanswering_port(is_listening: bool) -> Iterator[int]:
    """Yield a port that accepts connections and never answers, or one at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        if not is_listening:
            listener.close()
        yield port


@asynccontextmanager
async def run_reasoning(
    start_gateway: StartGateway, card: ModelCard, *, is_ours: bool
) -> AsyncIterator[RunningGateway]:
    """Run a gateway with one engine: an engine of ours controls reasoning and follows grammars, others do not."""
    card = msgspec.structs.replace(card, controls_reasoning=is_ours, follows_grammars=is_ours)
    async with start_gateway([FakeEngineClient(card)]) as running, running.anthropic:
        yield running


Until = Callable[[Callable[[], object]], Awaitable[None]]
NewCard = Callable[..., ModelCard]
ToolCard = Callable[..., ModelCard]


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
        """One request to the admin API, whose status must be `expect`: the decoded answer."""
        data = b"" if body is None else json.dumps(body).encode()
        status, _, answer = await self.request(method, f"/admin/v1{path}", data, self.admin_key)
        assert status == expect, answer
        return json.loads(answer)

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
        """Of one user message."""
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
    """Tables, the shipped classes and the first keys, which are returned."""
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
    """What a store is when it was just made, and its keys."""

    file: bytes
    keys: BootstrapResult


_new_stores: list[NewStore] = []  # the first that this process made, if any


async def keys_of(path: Path, clock: Clock) -> BootstrapResult:
    """The first keys of the store in that file. One that is new is like every other, so only the first is made."""
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
    **settings: Any,
) -> AsyncIterator[RunningGateway]:
    """Run a gateway of these engines.

    With `stores_usage` usage rows go to the store, as they do outside of tests; else they stay in a list. With
    `beside`, on the database of that gateway. `now` is the database's clock, `breaker_clock` that of the engines'
    circuit breakers. Spans of requests that `sampling` keeps go to the `sender`.
    """
    clock, rows, store_clock = SystemClock(), RowList(), StoreClock()
    url = f"sqlite:///{tmp_path / 'store.db'}"
    keys = beside.keys if beside else await keys_of(tmp_path / "store.db", clock)
    database = Database.open(url)
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


_logged = io.StringIO()


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
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
def until() -> Until:
    """`await until(condition)`: returns once it holds, fails after a deadline. For states that announce no change."""

    async def wait(condition: Callable[[], object]) -> None:
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
def new_card() -> NewCard:
    return make_card


@pytest.fixture
def tool_card() -> ToolCard:
    """A card whose model is named for the family that its chat template is of; what marks its calls may be special
    tokens or other added ones."""

    def make(
        family: str,
        *,
        template: str = "",
        special: Sequence[str] = (),
        added: Sequence[str] = (),
        engine_id: str = "",
    ) -> ModelCard:
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
def thinking_card(tool_card: ToolCard) -> ModelCard:
    """A card whose model thinks before it answers, and can be told not to; its markers are tokens."""
    switch = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    template = (TOOL_TEMPLATES / "hermes.jinja").read_text() + switch
    return tool_card("hermes", template=template, added=("<think>", "</think>"))


@pytest.fixture
async def tool_gateway(start_gateway: StartGateway, tool_card: ToolCard) -> AsyncIterator[RunningGateway]:
    """A gateway with a model of each family that calls tools."""
    engines = [FakeEngineClient(tool_card(family)) for family in ("hermes", "llama", "mistral")]
    async with start_gateway(engines) as running, running.anthropic:
        yield running


@pytest.fixture
def start_gateway(tmp_path: Path) -> StartGateway:
    """`async with start_gateway(engines, **settings) as gateway`."""

    def start(
        engines: Sequence[EngineClient], sender: Sender | None = None, **settings: Any
    ) -> AbstractAsyncContextManager[RunningGateway]:
        return run_gateway(tmp_path, engines, sender, **settings)

    return start


@pytest.fixture
def start_over(start_gateway: StartGateway, until: Until) -> StartOver:
    """`async with start_over(*engines, **settings) as gateway`: once all are connected."""

    @asynccontextmanager
    async def start(*engines: Any, **settings: Any) -> AsyncIterator[RunningGateway]:
        async with start_gateway(list(engines), **settings) as gateway:
            await until(lambda: all(engine.state.healthy for engine in engines))
            yield gateway

    return start


@pytest.fixture
async def gateway(start_gateway: StartGateway, card: ModelCard) -> AsyncIterator[RunningGateway]:
    async with start_gateway([FakeEngineClient(card)]) as running:
        yield running
