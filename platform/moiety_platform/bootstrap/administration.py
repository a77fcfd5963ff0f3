"""Parts of the admin API beside tenants, keys and quotas: engines, webhooks, adapters, simulations, settings."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from ipaddress import ip_network
from types import TracebackType
from typing import Any, Self

from litestar import Router

from moiety_platform.adapters.cache import AdapterCache
from moiety_platform.adapters.controller import AdapterController, AdapterStorage
from moiety_platform.agent_runs.controller import RunController
from moiety_platform.alert_watch.watch import AlertThresholds, AlertWatch
from moiety_platform.alerts.controller import AlertController
from moiety_platform.auth.pepper import PepperRotation
from moiety_platform.bootstrap.pending_work import PendingWorkReader
from moiety_platform.clock import Clock
from moiety_platform.contracts.controller import ContractCheckController
from moiety_platform.contracts.runner import ContractChecks
from moiety_platform.controllers import with_services
from moiety_platform.db.session import Database
from moiety_platform.document_extraction.text_cache import DocumentTextCache
from moiety_platform.experts.controller import ExpertController
from moiety_platform.experts.service import ExpertService
from moiety_platform.guardrails.controller import GuardrailController
from moiety_platform.jwt_issuers.controller import JwtIssuerController
from moiety_platform.live_settings import LiveSettings
from moiety_platform.model_catalog.controller import ModelCatalogController
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.reloading.controller import SettingController
from moiety_platform.reloading.reloader import Reloader
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.request_contents.cipher import ContentCipher
from moiety_platform.request_contents.controller import RequestContentController
from moiety_platform.routing.controller import EngineController
from moiety_platform.routing.replicas import Replicas
from moiety_platform.settings import GatewaySettings
from moiety_platform.simulations.controller import SimulationController
from moiety_platform.simulations.runner import Simulations
from moiety_platform.tenant_deletion.controller import DeletionServices, TenantDeletionController
from moiety_platform.tenant_deletion.engine_notice import EngineNotice, TenantDataHolder
from moiety_platform.webhooks.addresses import AddressPolicy, Network
from moiety_platform.webhooks.controller import WebhookController
from moiety_platform.webhooks.sender import AlertSender
from moiety_platform.webhooks.tester import WebhookTester
from moiety_platform.webhooks.webhook_client import WebhookClient
from moiety_text.segment_cache import SegmentCache


@dataclass(eq=False, repr=False)
class Administration:
    """Background services of the admin API: alerts, notices of tenant deletion to engines, simulations.

    The entry point enters it; the services run until its exit. `report_database` is the same store for read-only use;
    `peppers` are the current one and those of a rotation.
    """

    settings: GatewaySettings
    database: Database
    report_database: Database
    objects: ObjectStore
    peppers: tuple[bytes, PepperRotation]
    clock: Clock
    adapters: AdapterCache
    replicas: Replicas
    document_texts: DocumentTextCache
    encoding_cache: SegmentCache

    def __post_init__(self) -> None:
        settings = self.settings
        self.pending_work = pending_work = PendingWorkReader(self.database)
        self._engine_notice = EngineNotice(
            self.database, self._holders_of_tenant_data, count_deletions=pending_work.num_deletions
        )
        self.reach = AddressPolicy(networks_of(settings))
        self._adapter_storage = AdapterStorage(settings.max_adapter_bytes, settings.max_adapter_bytes_per_tenant)
        bounds: Any = {"limit_s": settings.simulation_limit_s, "niceness": settings.simulation_niceness}
        self.simulations = Simulations(self.report_database, **bounds)
        self.contract_checks = ContractChecks(self.report_database, **bounds)
        thresholds = AlertThresholds.of(settings)
        self._watch = AlertWatch(
            self.database,
            self.replicas.states,
            settings.data_dir,
            self.clock,
            thresholds,
            has_conditions=pending_work.has_conditions,
        )
        self._stack = AsyncExitStack()

    def _holders_of_tenant_data(self) -> list[TenantDataHolder]:
        return [*self.replicas.connected(), self.replicas, self.document_texts, self.encoding_cache]

    async def __aenter__(self) -> Self:
        self._stack.push_async_callback(self.pending_work.stop)
        poster = await self._stack.enter_async_context(WebhookClient(self.reach))
        pepper, turn = self.peppers
        alerts = AlertSender(
            self.database,
            poster,
            pepper,
            self.clock,
            previous_pepper=turn.previous,
            may_have_alerts=self.pending_work.may_have_alerts,
        )
        await alerts.start()
        self._stack.push_async_callback(alerts.stop)
        await self._watch.start()
        self._stack.push_async_callback(self._watch.stop)
        peppers = [one for one in (pepper, turn.previous) if one is not None]
        self._tester = WebhookTester(poster, peppers, self.clock)
        self._stack.push_async_callback(self.simulations.stop)
        self._stack.push_async_callback(self.contract_checks.stop)
        self._engine_notice.start()
        self._stack.push_async_callback(self._engine_notice.stop)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def routes(
        self,
        traces: Database | None,
        source: SettingsSource[GatewaySettings],
        live: LiveSettings[GatewaySettings],
        reloader: Reloader[GatewaySettings] | None,
    ) -> list[Router]:
        """Return the controllers for the admin router to register."""
        return [
            with_services(EngineController, replicas=self.replicas),
            with_services(ExpertController, experts=ExpertService(self.replicas, self.clock)),
            with_services(SimulationController, simulations=self.simulations, engines=self.replicas.states),
            with_services(ContractCheckController, contract_checks=self.contract_checks, engines=self.replicas.states),
            with_services(WebhookController, reach=self.reach, tester=self._tester),
            with_services(AlertController),
            with_services(ModelCatalogController, replicas=self.replicas),
            with_services(GuardrailController, reach=self.reach),
            with_services(JwtIssuerController, reach=self.reach),
            with_services(RequestContentController, content_cipher=ContentCipher(*self.peppers)),
            with_services(RunController),
            with_services(
                TenantDeletionController, deletion=DeletionServices(self.objects, traces, self._engine_notice.wake)
            ),
            with_services(
                AdapterController,
                adapter_cache=self.adapters,
                adapter_storage=self._adapter_storage,
                objects=self.objects,
            ),
            with_services(SettingController, source=source, live=live, reloader=reloader),
        ]

    def followed_by(self, live: LiveSettings[GatewaySettings]) -> None:
        live.follow(["webhook_networks"], self._set_webhook_networks)
        self._watch.followed_by(live)
        live.follow(["max_adapter_bytes", "max_adapter_bytes_per_tenant"], self._set_adapter_limits)
        live.follow(["simulation_limit_s", "simulation_niceness"], self._set_simulation_limits)

    def _set_webhook_networks(self, settings: GatewaySettings) -> None:
        self.reach.networks = networks_of(settings)

    def _set_adapter_limits(self, settings: GatewaySettings) -> None:
        self._adapter_storage.max_bytes = settings.max_adapter_bytes
        self._adapter_storage.max_tenant_bytes = settings.max_adapter_bytes_per_tenant

    def _set_simulation_limits(self, settings: GatewaySettings) -> None:
        for runner in (self.simulations, self.contract_checks):
            runner.limit_s = settings.simulation_limit_s
            runner.niceness = settings.simulation_niceness


def networks_of(settings: GatewaySettings) -> tuple[Network, ...]:
    """Return the networks that webhooks may reach beside the public internet."""
    return tuple(map(ip_network, settings.webhook_networks))
