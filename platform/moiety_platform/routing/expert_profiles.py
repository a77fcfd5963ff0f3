"""Profiles of the experts that tenants' requests use, and the engines whose steps use the same ones.

Engines that sample profiles (`--expert-profiles`) report those of ended requests and of their recent steps. A request
is expected to use the experts of earlier requests with the same beginning, or else of its tenant.

The cost at an engine is what its tokens then wait for, in experts that a step reads: the request waits for those that
the engine's steps read anyway, and it and each running request wait for those that the request adds. The cost is far
less at an idle engine, and of busy ones it is less where the steps use the request's experts. Differences become a
bounded number of prompt tokens, in which the gateway counts prefixes and load; small ones are chance and count in part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import structlog

from moiety_platform.engine_client.base import EngineState
from moiety_wire.expert_profile import ExpertProfile

KEY_TOKENS = 64  # requests of a tenant with the same first tokens have a profile of their own
MAX_TENANTS = 1024  # of which profiles are kept; the least recently used ones are dropped
MAX_PREFIXES = 8  # of one tenant
FULL_GAIN = 0.3  # a cost in experts that is this part less than the mean counts in full
MIN_SAMPLES = 30  # of a profile that is used
MAX_SAMPLES = 255  # of a tenant's or a prefix's profile, which fade then
MAX_ENGINES = 1024  # whose profiles are kept decoded

log = structlog.get_logger(__name__)

_TenantKey = tuple[str, str]  # model, tenant


class _TenantExperts:
    """Profiles of the requests of one tenant to one model: of all, and by their first tokens."""

    __slots__ = ("by_prefix", "of_all")

    def __init__(self, num_bytes: int) -> None:
        self.of_all = ExpertProfile(num_bytes, MAX_SAMPLES)
        self.by_prefix: OrderedDict[int, ExpertProfile] = OrderedDict()  # the least recently used first


@dataclass(frozen=True, slots=True)
class ExpertPreference:
    """Preference of one request for engines that use its experts."""

    profiles: ExpertProfiles
    model: str
    tenant_id: str
    prefix_name: int | None

    def saved_tokens(self, engines: Sequence[EngineState]) -> list[int] | None:
        """Return `ExpertProfiles.saved_tokens` of the request at these engines."""
        return self.profiles.saved_tokens(engines, self.model, self.tenant_id, self.prefix_name)


class ExpertProfiles:
    """Owner of the profiles of one gateway process. For one event loop."""

    def __init__(self, spare_tokens: int) -> None:
        """Create it, empty.

        A request may cost up to so many prompt tokens more than at the cheapest engine where its experts are used.
        """
        self.spare_tokens = spare_tokens
        self._tenants: OrderedDict[_TenantKey, _TenantExperts] = OrderedDict()  # the least recently used first
        self._active: dict[str, tuple[bytes, ExpertProfile | None]] = {}  # of engines, by address

    def learn(self, model: str, tenant_id: str, prefix_name: int | None, packed: bytes) -> None:
        """Take the profile of an ended request. `prefix_name` names its first tokens; None for a shorter prompt."""
        profile = _unpacked(packed, model)
        if profile is None:
            return
        tenant = self._tenants.get((model, tenant_id))
        if tenant is None:
            tenant = self._tenants[model, tenant_id] = _TenantExperts(profile.num_bytes)
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end((model, tenant_id))
        learning = [tenant.of_all]
        if prefix_name is not None:
            of_prefix = tenant.by_prefix.get(prefix_name)
            if of_prefix is None:
                of_prefix = tenant.by_prefix[prefix_name] = ExpertProfile(profile.num_bytes, MAX_SAMPLES)
                if len(tenant.by_prefix) > MAX_PREFIXES:
                    tenant.by_prefix.popitem(last=False)
            tenant.by_prefix.move_to_end(prefix_name)
            learning.append(of_prefix)
        for one in learning:
            one.merge(profile)

    def profile_of(self, model: str, tenant_id: str, prefix_name: int | None) -> ExpertProfile | None:
        """Return the experts that a request is expected to use; None if too few samples are known."""
        tenant = self._tenants.get((model, tenant_id))
        if tenant is None:
            return None
        of_prefix = None if prefix_name is None else tenant.by_prefix.get(prefix_name)
        for profile in (of_prefix, tenant.of_all):
            if profile is not None and profile.num_samples >= MIN_SAMPLES:
                return profile
        return None

    def saved_tokens(
        self, engines: Sequence[EngineState], model: str, tenant_id: str, prefix_name: int | None
    ) -> list[int] | None:
        """Return by how many prompt tokens the request costs less at each engine; negative where it costs more.

        0 for an engine that has requests but reports no active experts. None if the request's experts are not known.
        """
        profile = self.profile_of(model, tenant_id, prefix_name)
        if profile is None:
            return None
        costs = [self._expert_cost(profile, engine) for engine in engines]
        known = [cost for cost in costs if cost is not None]
        if not any(known):
            return [0] * len(costs)
        mean = sum(known) / len(known)
        gains = [0.0 if cost is None else (1 - cost / mean) / FULL_GAIN for cost in costs]
        return [round(min(1.0, max(-1.0, gain)) * self.spare_tokens / 2) for gain in gains]

    def _expert_cost(self, profile: ExpertProfile, engine: EngineState) -> float | None:
        """Return the experts of a step that the request waits for, and that others wait for because of it.

        None if they are not known.
        """
        load, own = engine.load, profile.mean_experts
        active = self._active_at(engine)
        if load is None or (active is None and load.num_running):
            return None
        if active is None:
            return own
        return active.mean_experts + (load.num_running + 1) * own * (1 - profile.overlap(active))

    def forget_tenants(self, tenant_ids: Collection[str]) -> None:
        """Remove the profiles of deleted tenants. Never raises."""
        deleted = frozenset(tenant_ids)
        for key in [key for key in self._tenants if key[1] in deleted]:
            del self._tenants[key]

    def _active_at(self, engine: EngineState) -> ExpertProfile | None:
        packed = b"" if engine.load is None else engine.load.active_experts
        if not packed:
            return None
        known = self._active.get(engine.address)
        if known is None or known[0] is not packed:
            if known is None and len(self._active) >= MAX_ENGINES:
                self._active.clear()
            known = self._active[engine.address] = packed, _unpacked(packed, engine.address)
        return known[1]


def _unpacked(packed: bytes, source: str) -> ExpertProfile | None:
    try:
        return ExpertProfile.unpack(packed)
    except ValueError as exc:
        log.warning("expert_profile_unreadable", source=source, error=str(exc), advice="run the same release of both")
        return None
