"""Actions of routes that administer no resource: views of records and of running requests, and control of engines."""

from __future__ import annotations

from moiety_platform.access.actions import (
    NOBODY,
    OPERATORS,
    OWN_READERS,
    OWN_WRITERS,
    OWNER,
    READERS,
    SELF_SERVICE,
    AdminAction,
)

READ_USAGE = AdminAction("usage.read", READERS, OWN_READERS)
RECONCILE_USAGE = AdminAction("usage.reconcile", READERS)
READ_CONTENTS = AdminAction("request_contents.read", NOBODY, OWN_WRITERS)
CONFIGURE_CONTENTS = AdminAction("request_contents.configure", NOBODY, OWN_WRITERS)
READ_OVERVIEW = AdminAction("overview.read", READERS, OWN_READERS)
READ_CALLER = AdminAction("caller.read", READERS, OWN_READERS | SELF_SERVICE)
ACCEPT_INVITATION = AdminAction("invitations.accept", READERS, OWN_READERS | SELF_SERVICE)  # and people without a role
READ_OWN = AdminAction("self_service.read", NOBODY, SELF_SERVICE)
WRITE_OWN_KEYS = AdminAction("self_service.write_keys", NOBODY, SELF_SERVICE)
READ_AUDIT = AdminAction("audit.read", OWNER, OWN_READERS)
VERIFY_AUDIT = AdminAction("audit.verify", OWNER)
READ_ENGINES = AdminAction("engines.read", READERS)
SLEEP_ENGINES = AdminAction("engines.sleep", OPERATORS)
SCALE_ENGINES = AdminAction("engines.scale", OPERATORS)
READ_EXPERTS = AdminAction("experts.read", READERS, OWN_READERS)
PLAN_EXPERTS = AdminAction("experts.plan", READERS)
DELETE_STORED_ANSWERS = AdminAction("stored_answers.delete", OPERATORS, OWN_WRITERS)
READ_TRACES = AdminAction("traces.read", READERS, OWN_READERS)
SIMULATE = AdminAction("simulations.run", OPERATORS)
CHECK_CONTRACTS = AdminAction("contracts.check", OPERATORS)
READ_SETTINGS = AdminAction("settings.read", READERS)
READ_ALERTS = AdminAction("alerts.read", READERS, OWN_READERS)
READ_MODELS = AdminAction("models.read", READERS, OWN_READERS | SELF_SERVICE)
READ_BATCHES = AdminAction("batches.read", READERS, OWN_READERS)
READ_SPOT_PRICES = AdminAction("spot_prices.read", READERS, OWN_READERS)

VIEW_ACTIONS = (
    READ_USAGE,
    RECONCILE_USAGE,
    READ_CONTENTS,
    CONFIGURE_CONTENTS,
    READ_OVERVIEW,
    READ_CALLER,
    ACCEPT_INVITATION,
    READ_OWN,
    WRITE_OWN_KEYS,
    READ_AUDIT,
    VERIFY_AUDIT,
    READ_ENGINES,
    SLEEP_ENGINES,
    SCALE_ENGINES,
    READ_EXPERTS,
    PLAN_EXPERTS,
    DELETE_STORED_ANSWERS,
    READ_TRACES,
    SIMULATE,
    CHECK_CONTRACTS,
    READ_SETTINGS,
    READ_ALERTS,
    READ_MODELS,
    READ_BATCHES,
    READ_SPOT_PRICES,
)
