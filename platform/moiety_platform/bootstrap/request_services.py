"""Starts the services that requests use beside the stores: recorders, prices, receipts, files and the waker."""

from __future__ import annotations

from contextlib import AsyncExitStack

from moiety_platform.batches.assembly import Batches
from moiety_platform.bootstrap.administration import networks_of
from moiety_platform.bootstrap.document_preparation import document_preparation_of
from moiety_platform.bootstrap.engines import Engines, key_files
from moiety_platform.bootstrap.image_preparation import link_fetcher_of
from moiety_platform.bootstrap.overrides import Overrides
from moiety_platform.clock import Clock
from moiety_platform.content_settings import ContentSettings
from moiety_platform.db.session import Database
from moiety_platform.document_extraction.text_cache import DocumentTextCache
from moiety_platform.files.prompt_files import UploadedPromptFiles
from moiety_platform.inference.document_preparation import DocumentPreparation
from moiety_platform.inference.image_preparation import ImagePreparation
from moiety_platform.inference.request_recorder import RequestRecorder, UsageSink
from moiety_platform.inference.shadow_traffic import ShadowTraffic
from moiety_platform.live_settings import LiveSettings
from moiety_platform.machine_limits import MachineCollector, MachineLimits
from moiety_platform.metrics import Metrics
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.receipts.service import Receipts
from moiety_platform.receipts.signing import key_file_of, load_signer
from moiety_platform.reloading.reloader import Reloader, ReloadMetrics
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.request_contents.cipher import ContentCipher
from moiety_platform.request_contents.redaction import MAX_ANSWER_BYTES, ContentRedactor
from moiety_platform.request_contents.writer import ContentWriter
from moiety_platform.responses_api.background import BackgroundRuns
from moiety_platform.responses_api.conversation_locks import ConversationLocks
from moiety_platform.responses_api.conversation_store import ConversationStore
from moiety_platform.responses_api.response_service import ResponseService
from moiety_platform.settings import GatewaySettings
from moiety_platform.speculative_prefill.metrics import SpeculativePrefillMetrics
from moiety_platform.speculative_prefill.next_turn_prefill import NextTurnPrefill
from moiety_platform.spot.service import SpotMetrics, SpotPrices
from moiety_platform.usage.recorder import UsageRecorder
from moiety_platform.wake_on_request.metrics import wake_families
from moiety_platform.wake_on_request.waker import EngineWaker
from moiety_platform.webhooks.addresses import AddressPolicy
from moiety_platform.webhooks.json_endpoint import JsonEndpoint

LAST_RECORDS_S = 10.0


def spot_prices_of(
    database: Database, engines: Engines, metrics: Metrics, settings: GatewaySettings, overrides: Overrides
) -> SpotPrices:
    """Return the prices of spot classes, by the load of these engines."""
    spot_metrics = SpotMetrics(metrics.registry)
    states = engines.replicas.states
    return SpotPrices(database, states, overrides.clock, spot_metrics, settings.spot_interval_s, overrides.now)


def receipts_of(settings: GatewaySettings, database: Database, clock: Clock, usage: UsageRecorder) -> Receipts:
    """Return the receipts of requests, signed with the keys of the settings' file. Raises BadReceiptKey."""
    signer = load_signer(key_file_of(settings.receipt_key_file, settings.data_dir))
    return Receipts(database, signer, clock, usage.holds, usage.flush)


def start_contents(
    stack: AsyncExitStack,
    settings: GatewaySettings,
    live: LiveSettings[GatewaySettings],
    database: Database,
    cipher: ContentCipher,
    overrides: Overrides,
) -> ContentWriter:
    """Start the writer of contents of requests, until the stack is closed."""
    redactor = ContentRedactor(JsonEndpoint(AddressPolicy(), MAX_ANSWER_BYTES))
    stack.push_async_callback(redactor.endpoint.close)

    def use(settings: GatewaySettings) -> None:
        redactor.endpoint.reach.networks = networks_of(settings)
        redactor.url, redactor.timeout_s = settings.content_redaction_url, settings.content_redaction_timeout_ms / 1000

    use(settings)
    live.follow(["webhook_networks", *ContentSettings.model_fields], use)
    writer = ContentWriter(database, cipher, redactor, now=overrides.now)
    writer.start()
    stack.push_async_callback(writer.stop)
    return writer


def start_recorder(
    stack: AsyncExitStack, settings: GatewaySettings, live: LiveSettings[GatewaySettings], recorder: RequestRecorder
) -> None:
    """Let the recorder follow its setting, and finish its records before the stack closes what they need."""
    recorder.use(settings)
    live.follow(["access_log_rate"], recorder.use)
    stack.push_async_callback(recorder.wait_idle, LAST_RECORDS_S)


async def start_machine_limits(stack: AsyncExitStack, settings: GatewaySettings, metrics: Metrics) -> MachineLimits:
    """Start the watch over disk space and open files, until the stack is closed."""
    metrics.registry.register(MachineCollector(settings.data_dir, settings.supervisor_status))
    machine = MachineLimits(settings.data_dir)
    await machine.start()
    stack.push_async_callback(machine.stop)
    return machine


async def start_waker(
    stack: AsyncExitStack,
    settings: GatewaySettings,
    live: LiveSettings[GatewaySettings],
    process_id: str,
    database: Database,
    overrides: Overrides,
    engines: Engines,
    metrics: Metrics,
) -> EngineWaker:
    """Start the waker of sleeping engines, until the stack is closed. Raises CannotApplySetting."""
    waker = EngineWaker(process_id, database, engines.replicas, overrides.clock, settings, overrides.open_scaler)
    metrics.watch(lambda: wake_families(waker))
    waker.followed_by(live)
    await waker.start()
    stack.push_async_callback(waker.stop)
    return waker


def background_runs_of(
    responses: ResponseService, database: Database, overrides: Overrides, settings: GatewaySettings
) -> BackgroundRuns:
    return BackgroundRuns(responses, ConversationLocks(database, ConversationStore(overrides.now)), settings.drain_s)


async def open_files(
    stack: AsyncExitStack,
    settings: GatewaySettings,
    live: LiveSettings[GatewaySettings],
    batches: Batches,
    texts: DocumentTextCache,
    metrics: Metrics,
) -> tuple[ImagePreparation, DocumentPreparation]:
    """Open the preparation of images and documents of prompts, until the stack is closed."""
    uploaded = UploadedPromptFiles(batches.files)
    fetcher = await stack.enter_async_context(link_fetcher_of(settings, live))
    documents = document_preparation_of(settings, live, uploaded, texts, metrics.registry, fetcher)
    stack.push_async_callback(documents.close)
    return ImagePreparation(fetcher, uploaded.read_all), documents


async def start_next_turn_prefill(
    stack: AsyncExitStack, usage: UsageSink, quotas: QuotaEnforcer, metrics: Metrics, clock: Clock
) -> NextTurnPrefill:
    """Start speculative prefill of next turns, until the stack is closed."""
    prefill_metrics = SpeculativePrefillMetrics(metrics.registry)
    return await stack.enter_async_context(NextTurnPrefill(usage, quotas, prefill_metrics, clock))


def open_shadow_traffic(
    stack: AsyncExitStack, recorder: RequestRecorder, engines: Engines, metrics: Metrics
) -> ShadowTraffic:
    """Open shadow traffic, until the stack is closed."""
    shadow = ShadowTraffic(recorder, engines.replicas, metrics)
    stack.push_async_callback(shadow.close)
    return shadow


def reloader_of(
    source: SettingsSource[GatewaySettings], live: LiveSettings[GatewaySettings], metrics: Metrics
) -> Reloader[GatewaySettings] | None:
    """Return what reloads the settings' file; None without a file."""
    reload_metrics = ReloadMetrics(metrics.registry)
    return None if source.path is None else Reloader(source, live, reload_metrics, beside=key_files)
