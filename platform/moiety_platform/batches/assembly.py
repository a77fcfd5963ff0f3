"""Files and batches of one gateway process: their routes, and the worker that answers lines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field

from litestar import Router

from moiety_platform.anthropic_api.errors import answer_error_of_version
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.client import owner_of_request
from moiety_platform.backoff import Backoff
from moiety_platform.batches.controller import BatchController, BatchServices
from moiety_platform.batches.execution import HeldRows, LineRunner
from moiety_platform.batches.line_limits import BatchLineLimits
from moiety_platform.batches.maintenance import BatchMaintenance
from moiety_platform.batches.results import BatchFiles
from moiety_platform.batches.worker import POLL_S, BatchWorker
from moiety_platform.clock import Clock
from moiety_platform.controllers import with_services
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.errors import PlatformError
from moiety_platform.files.contents import FileContents
from moiety_platform.files.controller import FileController
from moiety_platform.files.file_limits import FileLimits
from moiety_platform.files.service import Files
from moiety_platform.files.store import Now
from moiety_platform.files.upload import Uploads
from moiety_platform.inference.pipeline import RequestPipeline
from moiety_platform.inference.request_recorder import RequestRecorder
from moiety_platform.inference.shape_limits import ShapeLimits
from moiety_platform.metrics import Metrics
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.request_head import api_key_authorization
from moiety_platform.settings import GatewaySettings
from moiety_platform.traces.tracing import Tracing


class ClientFileController(FileController):
    """Routes of files, with errors in the format of the client's API."""

    exception_handlers = {PlatformError: answer_error_of_version}  # noqa: RUF012  read by the framework only


@dataclass(eq=False, repr=False)
class Batches:
    """Batch subsystem, created by the entry point.

    `worker_id` must never have been used before; `now` is the database's clock.
    """

    worker_id: str
    database: Database
    objects: ObjectStore
    authenticator: Authenticator
    quotas: QuotaEnforcer
    metrics: Metrics
    tracing: Tracing
    clock: Clock
    settings: GatewaySettings
    _: KW_ONLY
    poll_s: float = POLL_S
    backoff: Backoff = field(default_factory=Backoff)
    now: Now = now_ms
    has_open: Callable[[], Awaitable[bool]] | None = None

    def __post_init__(self) -> None:
        settings = self.settings
        self._rows = HeldRows()
        self._recorder = RequestRecorder(self._rows, self.quotas, self.metrics, self.tracing, self.clock)
        self._contents = FileContents(self.database, self.objects, BatchFiles(self.database), self.now)
        self.files = Files(self.database, self._contents, self.now)
        self.uploads = Uploads(self.database, self.objects, FileLimits.of(settings), self.now)
        self.services = BatchServices(
            self.database,
            settings.max_open_batches_per_tenant,
            settings.keep_files_s,
            on_change=self._wake,
            now=self.now,
        )
        self._tending = BatchMaintenance(self.database, self._contents, BatchLineLimits.of(settings), now=self.now)
        self._runner: LineRunner | None = None
        self._worker: BatchWorker | None = None

    def limits(self) -> BatchLineLimits:
        """Return the current limits of a batch and its lines."""
        return BatchLineLimits.of(self.settings)

    def routes(self) -> list[Router]:
        """Return the routes of `/v1/files` and `/v1/batches`."""
        owner = owner_of_request(self.authenticator)
        owner_of_file = owner_of_request(self.authenticator, api_key_authorization)
        return [
            with_services(ClientFileController, owner=owner_of_file, files=self.files, uploads=self.uploads),
            with_services(BatchController, owner=owner, batches=self.services),
        ]

    def use(self, settings: GatewaySettings) -> None:
        """Apply new settings to later files, batches and lines."""
        self.settings = settings
        self.uploads.limits = FileLimits.of(settings)
        self.services.keep_files_s = settings.keep_files_s
        self.services.max_open_batches = settings.max_open_batches_per_tenant
        self._tending.limits = BatchLineLimits.of(settings)
        if self._runner is not None:
            self._runner.max_json_depth, self._runner.shape = settings.max_json_depth, ShapeLimits.of(settings)
        if self._worker is not None:
            self._worker.use(settings.batch_concurrency, settings.batch_lease_s)

    @asynccontextmanager
    async def working(self, pipeline: RequestPipeline) -> AsyncIterator[None]:
        """Answer lines through this pipeline while the context is open.

        With a concurrency of 0 other gateways do all the work.
        """
        settings = self.settings
        parts = (self.authenticator, self._recorder, self._rows, pipeline, self._contents)
        self._runner = LineRunner(*parts, settings.max_json_depth, ShapeLimits.of(settings), self.backoff)
        worker = self._worker = BatchWorker(
            self.worker_id,
            self.database,
            self._runner,
            self._tending,
            self.clock,
            concurrency=settings.batch_concurrency,
            lease_s=settings.batch_lease_s,
            poll_s=self.poll_s,
            backoff=self.backoff,
            now=self.now,
            has_open=self.has_open,
        )
        await worker.start()
        try:
            yield
        finally:
            await worker.stop()

    def drain(self) -> None:
        """Give back the lines without a part of an answer to other gateways, before the process stops."""
        if self._worker is not None:
            self._worker.drain()

    def _wake(self) -> None:
        if self._worker is not None:
            self._worker.wake()
