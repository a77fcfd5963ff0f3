"""A gateway all of whose strings are hostile. It answers the admin API by the schemas of the real routes, with markup
in every field that is free text, and stands for names that an old version, an engine or another tenant wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from litestar import Litestar
from tests.server_thread import serving_in_thread

from moiety_platform.adapters.controller import AdapterController
from moiety_platform.administration.catalog import ACTIONS
from moiety_platform.administration.router import admin_router
from moiety_platform.agent_runs.controller import RunController
from moiety_platform.alerts.controller import AlertController
from moiety_platform.contracts.controller import ContractCheckController
from moiety_platform.controllers import with_services
from moiety_platform.experts.controller import ExpertController
from moiety_platform.guardrails.controller import GuardrailController
from moiety_platform.model_catalog.controller import ModelCatalogController
from moiety_platform.openapi.documents import DocumentPart, make_document
from moiety_platform.request_contents.controller import RequestContentController
from moiety_platform.routing.controller import EngineController
from moiety_platform.settings import GatewaySettings
from moiety_platform.simulations.controller import SimulationController
from moiety_platform.webhooks.controller import WebhookController

TRACE_ID = "ab" * 16  # the form that the page of a trace accepts
TIMES = re.compile(r".*_at|at|since|until|start|as_of|(window|month)_(start|end)|rate_since|day")
REVERSES = "\N{RIGHT-TO-LEFT OVERRIDE}"
DONE = 200, 201, 202


def hostile(port: int, where: str) -> str:
    """Return text that loads a picture, opens a link, draws an icon, a formula and so on, if it is read as markup."""
    picture = f"http://127.0.0.1:{port}/{where}.png"
    return (
        f"=cmd()![p]({picture}) <img src='{picture}' onerror=fetch('{picture}')> "
        f"[lxink](javascript:fetch('{picture}')) [mxore]({picture}) {picture} www.evil.example "
        f"a@evil.example :material/vpn_key: :smile: $\\frac{{1}}{{2}}$ "
        f":red[rxed] **bxold** `cxode` {{{{x}}}} {REVERSES}gnp\r\n\r\n# hxead\r\n\r\n![q]({picture})"
    )


@dataclass
class HostileGateway:
    """Answers made of schemas. `refuses` turns each into an error; `simulation` is the state of the last one."""

    port: int  # the port that no page may request
    refuses: bool = False
    simulation: str = "done"
    asked: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # what the API has no route for

    def __post_init__(self) -> None:
        nothing: Any = None  # no handler runs: only their schemas are read
        more = [
            with_services(EngineController, replicas=nothing),
            with_services(ExpertController, experts=nothing),
            with_services(RunController),
            with_services(GuardrailController, reach=nothing),
            with_services(AlertController),
            with_services(ModelCatalogController, replicas=nothing),
            with_services(WebhookController, reach=nothing, tester=nothing),
            with_services(AdapterController, adapter_cache=nothing, adapter_storage=nothing, objects=nothing),
            with_services(SimulationController, simulations=nothing, engines=nothing),
            with_services(ContractCheckController, contract_checks=nothing, engines=nothing),
            with_services(RequestContentController, content_cipher=nothing),
        ]
        router = admin_router(nothing, nothing, nothing, nothing, nothing, nothing, nothing, more=more)
        document = make_document(
            Litestar([router], openapi_config=None, logging_config=None), DocumentPart.ADMIN, GatewaySettings()
        )
        self._schemas: Mapping[str, Any] = document["components"]["schemas"]
        self._routes = [
            (method.upper(), re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), operation)
            for path, item in document["paths"].items()
            for method, operation in item.items()
        ]

    def answer(self, method: str, target: str) -> tuple[int, Any]:
        """Return the status and the decoded answer of a request."""
        self.asked.append(f"{method} {target}")
        path = target.partition("?")[0]
        if path == "/healthz":
            return 200, {"status": "ok"}
        if self.refuses:
            return 409, self._error()
        for known, pattern, operation in self._routes:
            if known == method and pattern.fullmatch(path):
                status, response = next((int(n), one) for n, one in operation["responses"].items() if int(n) in DONE)
                return status, self.make(response["content"]["application/json"]["schema"], "answer")
        self.unknown.append(f"{method} {target}")
        return 404, self._error()

    def _error(self) -> Any:
        return {"error": {"message": self.text("message"), "code": self.text("code"), "type": self.text("type")}}

    def text(self, where: str) -> str:
        return hostile(self.port, where)

    def make(  # noqa: PLR0911 - a return for each kind of schema
        self, schema: Mapping[str, Any], name: str, owner: str = ""
    ) -> Any:
        """Return a value of a schema: one item of every array, and no null where there is another type."""
        special = self._special(owner, name)
        if special is not None:
            return special()
        if "$ref" in schema:
            title = schema["$ref"].rpartition("/")[2]
            return self.make(self._schemas[title], name, title)
        if "anyOf" in schema:
            return self.make(next(one for one in schema["anyOf"] if one.get("type") != "null"), name, owner)
        if "enum" in schema:
            return "awake" if "awake" in schema["enum"] else schema["enum"][0]
        match schema.get("type"):
            case "object" if "properties" in schema:
                title = schema.get("title", "")
                return {one: self.make(of, one, title) for one, of in schema["properties"].items()}
            case "object":
                inner = schema.get("additionalProperties")
                key = self.text(f"key-of-{name}")
                return {key: self.make(inner, name)} if isinstance(inner, Mapping) else {key: self.text(name)}
            case "array" if "prefixItems" in schema:
                return [self.make(one, name, owner) for one in schema["prefixItems"]]
            case "array":
                return [self.make(schema["items"], name, owner)]
            case "boolean":
                return True
            case "integer":
                return 1
            case "number":
                return 1.0
            case "string" if TIMES.fullmatch(name):
                return datetime.now(UTC).isoformat()
        return self.text(name)

    def _special(self, owner: str, name: str) -> Callable[[], Any] | None:
        """Return what makes a field that pages compute with; the rest of them is whatever the schema allows."""
        if name == "id" or (
            name.endswith("_id") and (owner, name) not in ((_CALLER, "tenant_id"), ("SpanView", "span_id"))
        ):
            return lambda: self.text("id")  # the same id everywhere, so that related objects are found
        found: Mapping[tuple[str, str], Any] = {
            (_CALLER, "tenant_id"): None,
            (_CALLER, "may"): [action.name for action in ACTIONS],
            ("EngineViews", "data"): self._engines,
            ("KeyView", "status"): "active",
            ("ClassView", "shipped"): False,
            ("DeliveryReport", "delivered"): False,
            ("ClassView", "on_overload"): "reject",
            ("QuotaView", "level"): "tenant",
            ("QuotaView", "kind"): "tokens_per_day",
            ("LeaseView", "kind"): "tokens_per_day",
            ("Reconciliation", "agrees"): False,
            ("AuditVerdict", "intact"): False,
            ("AuditView", "erased_at"): None,
            ("AuditView", "before"): {"name": self.text("before")},
            ("AuditView", "after"): {"name": self.text("after")},
            ("UsageGroup", "group"): self._group,
            ("SpendGroup", "group"): self._group,
            ("BudgetView", "level"): "tenant",
            ("BudgetView", "kind"): "money_per_month",
            ("UsageMinuteSum", "group"): self._group,
            ("SimulationView", "state"): self.simulation,
            ("ContractCheckView", "state"): "done",
            ("ContractCheckView", "window_since"): datetime.now(UTC).isoformat(),
            ("SimulationView", "settings"): self._simulation_settings,
            ("TraceDetail", "spans"): self._spans,
            ("TraceDetail", "linked"): self._linked,
        }
        if name in ("next_cursor", "next_before"):
            return lambda: None
        if (owner, name) not in found:
            return None
        value = found[owner, name]
        return value if callable(value) else lambda: value

    def _engines(self) -> list[Any]:
        healthy, away = (self.make({"$ref": "#/components/schemas/EngineView"}, "engine") for _ in range(2))
        healthy["draining"] = False
        away |= {"healthy": False, "address": self.text("away")}
        return [healthy, away]

    def _group(self) -> dict[str, str]:
        names = ("tenant_id", "tenant_name", "project_id", "project_name", "key_id", "service_class", "model")
        slot = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=1)
        times = {"hour": slot.isoformat(), "day": f"{slot:%Y-%m-%d}"}
        return {**{one: self.text("id" if one.endswith("_id") else one) for one in names}, **times}

    def _simulation_settings(self) -> dict[str, Any]:
        return {
            "generate": self.text("generate"), "minutes": 60, "times": 1.0, "replicas_now": 1, "replicas": 1,
            "policy": self.text("policy"), "classes": {self.text("class"): {self.text("term"): self.text("value")}},
        }  # fmt: skip

    def _span(self, name: str, attributes: Mapping[str, Any]) -> Any:
        span = self.make({"$ref": "#/components/schemas/SpanView"}, "span")
        event = {"name": self.text("event"), "unix_ns": 2, "attributes": {self.text("says"): self.text("told")}}
        return span | {
            "name": name, "span_id": name, "parent_id": None, "start_ns": 1, "end_ns": 3_000_000,
            "attributes": attributes, "events": [event], "links": [],
        }  # fmt: skip

    def _spans(self) -> list[Any]:
        of_request = {
            **{f"moiety.{name}": self.text(name) for name in ("outcome", "request_id", "tenant_id", "service_class")},
            **{"moiety.kept_for": self.text("kept_for"), self.text("attribute"): [self.text("listed")]},
            **{"error.type": self.text("error"), "gen_ai.response.finish_reasons": [self.text("finish")]},
        }
        return [self._span(self.text("span"), of_request), self._span("engine.prefill", {})]

    def _linked(self) -> list[Any]:
        numbers = ("number", "decodes", "prefills", "prefill_tokens", "preempted", "output_tokens", "waiting")
        step: dict[str, Any] = {f"moiety.step.{name}": 1 for name in (*numbers, "kv_blocks_used", "kv_blocks_total")}
        step |= {"moiety.engine": self.text("engine"), "moiety.step.classes": [self.text("class")]}
        return [{"trace_id": self.text("trace"), "span": self._span("engine.step", step)}]

    def events(self) -> list[Any]:
        """Return the events of a streamed answer."""
        choice = {"index": 0, "delta": {"content": self.text("content")}, "finish_reason": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 2}
        first = {"id": self.text("completion"), "choices": [choice], "service_tier": self.text("tier")}
        return [first, {"choices": [], "usage": usage}]


_CALLER = "CallerView"


@contextmanager
def serving(gateway: HostileGateway) -> Iterator[str]:
    """Serve the gateway on a loopback port; yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            self.rfile.read(length)
            if self.path.startswith("/v1/") and not gateway.refuses:
                lines = [f"data: {json.dumps(event)}\n\n" for event in gateway.events()]
                self._send(200, "".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")
                return
            status, found = gateway.answer(self.command, self.path)
            self._send(status, json.dumps(found).encode(), "application/json")

        def _send(self, status: int, body: bytes, media_type: str) -> None:
            self.send_response(status)
            one_line = gateway.text("header").partition("\r")[0].replace(REVERSES, "")
            headers = {"content-type": media_type, "content-length": str(len(body)), "etag": '"1"'}
            for name, value in {**headers, "x-request-id": one_line, "x-ratelimit-limit": one_line}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

        def log_message(self, *args: Any) -> None:
            pass

    with serving_in_thread(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@contextmanager
def listening() -> Iterator[tuple[int, list[str]]]:
    """Listen on a port that no page may request; yield it and the requests that it got."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with serving_in_thread(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield server.server_port, asked
