"""The pages, in the order of the navigation; each draws the frames and charts of the API's answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moiety_dashboard.page import Page
from moiety_dashboard.views import (
    adapters,
    alerts,
    audit,
    batches,
    catalogue,
    classes,
    contract_check,
    engines,
    experts,
    guardrails,
    overview,
    own_keys,
    prices,
    quotas,
    requests,
    routes,
    runs,
    simulator,
    spend,
    users,
    webhooks,
)
from moiety_dashboard.views.playground import page as playground
from moiety_dashboard.views.tenants import page as tenants
from moiety_dashboard.views.traces import page as traces


@dataclass(frozen=True, slots=True)
class View:
    """One page. `needs` is the action without which it has nothing to show."""

    title: str
    icon: str
    path: str
    draw: Callable[[Page], None]
    needs: str | None = None


PAGES = (
    View("Overview", ":material/monitoring:", "overview", overview.draw, "overview.read"),
    View("My keys", ":material/key:", "my-keys", own_keys.draw, "self_service.read"),
    View("Tenants", ":material/groups:", "tenants", tenants.draw, "tenants.read"),
    View("Users", ":material/person:", "users", users.draw, "users.read"),
    View("Catalogue", ":material/menu_book:", "catalogue", catalogue.draw, "models.read"),
    View("Spend", ":material/payments:", "spend", spend.draw, "usage.read"),
    View("Service classes", ":material/speed:", "classes", classes.draw, "classes.read"),
    View("Engines", ":material/memory:", "engines", engines.draw, "engines.read"),
    View("Experts", ":material/grid_on:", "experts", experts.draw, "experts.read"),
    View("Requests", ":material/receipt_long:", "requests", requests.draw, "usage.read"),
    View("Traces", ":material/account_tree:", "traces", traces.draw, "traces.read"),
    View("Agent runs", ":material/smart_toy:", "runs", runs.draw, "runs.read"),
    View("Quotas", ":material/data_usage:", "quotas", quotas.draw, "quotas.read"),
    View("Prices", ":material/sell:", "prices", prices.draw, "prices.read"),
    View("Routes", ":material/alt_route:", "routes", routes.draw, "routes.read"),
    View("Guardrails", ":material/shield:", "guardrails", guardrails.draw, "guardrails.read"),
    View("Adapters", ":material/extension:", "adapters", adapters.draw, "adapters.read"),
    View("Batches", ":material/stacks:", "batches", batches.draw, "batches.read"),
    View("Alerts", ":material/notifications:", "alerts", alerts.draw, "alerts.read"),
    View("Webhooks", ":material/webhook:", "webhooks", webhooks.draw, "webhooks.read"),
    View("Playground", ":material/chat:", "playground", playground.draw),
    View("Simulator", ":material/science:", "simulator", simulator.draw, "simulations.run"),
    View("Contract check", ":material/handshake:", "contract-check", contract_check.draw, "contracts.check"),
    View("Audit", ":material/history:", "audit", audit.draw, "audit.read"),
)
