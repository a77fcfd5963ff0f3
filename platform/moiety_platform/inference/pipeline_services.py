"""Services that the request pipeline calls, and its limits."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_platform.adapters.cache import AdapterCache
from moiety_platform.admission.gate import AdmissionGate, StreamGate
from moiety_platform.agent_runs.service import AgentRuns
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.classes.cache import ClassCache
from moiety_platform.clock import Clock
from moiety_platform.idempotency.key_store_client import IdempotencyKeys
from moiety_platform.inference.document_preparation import DocumentPreparation
from moiety_platform.inference.guardrail_checks import GuardrailChecks
from moiety_platform.inference.image_preparation import ImagePreparation
from moiety_platform.inference.model_text_cache import ModelTexts
from moiety_platform.inference.request_body import BodyReader
from moiety_platform.inference.request_recorder import RequestRecorder
from moiety_platform.inference.shadow_traffic import ShadowTraffic
from moiety_platform.metrics import Metrics
from moiety_platform.quotes.quote import QuoteSigner
from moiety_platform.request_rules.cache import RequestRulesCache
from moiety_platform.routing.replicas import Replicas
from moiety_platform.speculative_prefill.next_turn_prefill import NextTurnPrefill
from moiety_platform.spot.service import SpotPrices
from moiety_platform.wake_on_request.waker import EngineWaker


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestServices:
    """Services of the process that the pipeline and other routes call. Opened and closed by the entry point."""

    authenticator: Authenticator
    idempotency: IdempotencyKeys
    recorder: RequestRecorder
    classes: ClassCache
    rules: RequestRulesCache
    replicas: Replicas
    metrics: Metrics
    clock: Clock
    images: ImagePreparation
    documents: DocumentPreparation
    quotes: QuoteSigner
    shadow: ShadowTraffic
    guardrails: GuardrailChecks
    runs: AgentRuns
    spot: SpotPrices
    adapters: AdapterCache | None = None
    next_turn_prefill: NextTurnPrefill | None = None
    waker: EngineWaker | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineServices(RequestServices):
    """Services that the pipeline calls."""

    bodies: BodyReader
    gate: AdmissionGate
    streams: StreamGate
    texts: ModelTexts


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """Settings of the pipeline that can change while it runs."""

    credit_window_tokens: int  # output tokens that an engine may generate ahead of the client
    max_sequences: int  # of one request
    failover_wait_s: float  # time that a sequence without a usable engine waits for one
    sse_keep_alive_s: float  # silence after which a stream gets a keep-alive event; 0: none
    clamps_max_tokens: bool = False  # for every API; otherwise only where a request's API does so
