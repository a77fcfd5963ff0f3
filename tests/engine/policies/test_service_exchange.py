"""Exchange of tenants' service between replicas: merging of reports, and shares over several replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_engine.scheduling.fairness.remote_service import MAX_ACCOUNTS, REPLICA_FORGOTTEN_S, RemoteService
from moiety_engine.scheduling.fairness.served_tenants import REPORTED_FOR_S, ServedTenants
from moiety_engine.scheduling.fairness.service_exchange import ServiceExchange
from moiety_engine.scheduling.fairness.tenant_counters import TenantCounter, TenantCounters
from moiety_engine.scheduling.policies.registry import POLICIES, counts_tenant_service
from moiety_wire.classes import FLEX
from moiety_wire.fleet_service import ReplicaService, ServiceReport, TenantService

MakeReplica = Callable[..., Any]
PERIOD_S = 0.5
NUM_BLOCKS, BLOCK_SIZE = 32, 4
LONGEST_PROMPT = 24
A_REQUEST = 8, 10  # prompt and output tokens of tenant "a"
VTC_BOUND = 2 * max(LONGEST_PROMPT, 2 * NUM_BLOCKS * BLOCK_SIZE)


# ── reports and their merging ──


class _Source:
    """Tenants of one replica that are served by hand, and the reports about them."""

    def __init__(self, engine_id: str = "other", max_tenants: int = 2) -> None:
        self.engine_id = engine_id
        self.served = ServedTenants()
        self.accounts = {name: TenantCounter(name) for name in "abcd"}
        self.now_s = 0.0
        self.max_tenants = max_tenants
        self.total = 0.0
        self.reports: list[ReplicaService] = []
        self.report()

    def serve(self, name: str, amount: float) -> None:
        account = self.accounts[name]
        self.served.track(account, 0, name)
        account.counter += amount
        self.total += amount

    def lift(self, name: str, amount: float) -> None:
        self.accounts[name].raise_counter(self.accounts[name].counter + amount)

    def report(self, wait_s: float = 0.0) -> None:
        self.now_s += wait_s
        report = self.served.report("vtc", self.now_s, self.max_tenants)
        assert len(report.tenants) <= self.max_tenants
        self.reports.append(ReplicaService(self.engine_id, report))


_ACTIONS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from([1.0, 7.0, 100.0]), st.sampled_from([0.1, REPORTED_FOR_S + 1])),
    max_size=20,
)


def _source_of(actions: list[tuple[str, float, float]]) -> _Source:
    source = _Source()
    for name, amount, wait_s in actions:
        source.serve(name, amount)
        source.lift(name, 1000.0)
        source.report(wait_s)
    for _ in range(3):  # those that were left out of the small reports
        source.report(0.1)
    return source


@given(_ACTIONS, st.data())
def test_every_order_with_duplicates_of_all_reports_counts_all_service_once(
    actions: list[tuple[str, float, float]], data: st.DataObject
) -> None:
    source = _source_of(actions)
    first, *others = source.reports
    twice = [*others, *data.draw(st.lists(st.sampled_from(others), max_size=10))]
    remote = RemoteService("vtc", PERIOD_S)
    remote.merge([first], 0.0)
    for number, report in enumerate(data.draw(st.permutations(twice))):
        remote.merge([report], 0.01 * number)
    assert remote.received_total == pytest.approx(source.total)


@given(_ACTIONS, st.data())
def test_no_loss_order_or_duplicate_makes_service_count_twice(
    actions: list[tuple[str, float, float]], data: st.DataObject
) -> None:
    source = _source_of(actions)
    remote, added = RemoteService("vtc", PERIOD_S), 0.0
    for number, report in enumerate(data.draw(st.lists(st.sampled_from(source.reports), max_size=40))):
        remote.merge([report], 0.1 * number)
        added += sum(one.service for one in remote.take_additions(0.1 * number))
        assert added <= remote.received_total + 1e-6
    assert remote.received_total <= source.total + 1e-6


def test_all_that_was_received_is_added_in_the_end() -> None:
    source = _Source(max_tenants=10)
    remote = RemoteService("vtc", PERIOD_S)
    remote.merge(source.reports, 0.0)
    source.serve("a", 1000.0)
    source.report()
    remote.merge(source.reports, PERIOD_S)
    first = sum(one.service for one in remote.take_additions(PERIOD_S))
    assert first == pytest.approx(500.0), "two replicas serve the tenant, so each corrects half"
    rest = sum(one.service for n in range(2, 60) for one in remote.take_additions(n * PERIOD_S))
    assert first + rest == pytest.approx(1000.0)


def test_a_replica_that_was_unknown_or_has_restarted_counts_from_its_first_report() -> None:
    source, remote = _Source(max_tenants=10), RemoteService("vtc", PERIOD_S)
    source.serve("a", 500.0)
    source.report()
    remote.merge(source.reports[-1:], 0.0)
    restarted = _Source("restarted", max_tenants=10)
    restarted.serve("a", 70.0)
    restarted.report()
    remote.merge(restarted.reports[-1:], 0.0)
    assert remote.received_total == 0
    source.serve("b", 5.0)
    restarted.serve("a", 3.0)
    for one in (source, restarted):
        one.report()
        remote.merge(one.reports[-1:], 1.0)
    assert remote.received_total == pytest.approx(8.0)
    assert remote.num_replicas == 2


def test_a_replica_that_is_silent_for_long_is_forgotten_and_counts_anew() -> None:
    source, remote = _Source(max_tenants=10), RemoteService("vtc", PERIOD_S)
    remote.merge(source.reports, 0.0)
    source.serve("a", 500.0)
    source.report()
    remote.merge([], REPLICA_FORGOTTEN_S + 1)
    assert remote.num_replicas == 0
    remote.merge(source.reports[-1:], REPLICA_FORGOTTEN_S + 2)
    assert remote.received_total == 0


def test_reports_of_another_policy_and_values_that_are_no_sums_are_ignored() -> None:
    remote = RemoteService("vtc", PERIOD_S)
    remote.merge([ReplicaService("other", ServiceReport("vtc", 0))], 0.0)
    bad = [TenantService(n, 0, "a", value) for n, value in enumerate((float("nan"), float("inf"), -5.0), 1)]
    remote.merge([ReplicaService("other", ServiceReport("vtc", 3, bad))], 1.0)
    remote.merge([ReplicaService("foreign", ServiceReport("dlpm", 0))], 1.0)
    remote.merge([ReplicaService("foreign", ServiceReport("dlpm", 1, [TenantService(1, 0, "a", 9.0)]))], 2.0)
    assert remote.received_total == 0
    assert remote.num_replicas == 1


def test_the_remembered_sums_are_bounded_and_a_dropped_account_never_counts_again() -> None:
    remote = RemoteService("vtc", PERIOD_S)
    remote.merge([ReplicaService("other", ServiceReport("vtc", 0))], 0.0)
    count = MAX_ACCOUNTS + 10
    tenants = [TenantService(n, 0, f"t{n}", 1.0) for n in range(1, count + 1)]
    late = ReplicaService("other", ServiceReport("vtc", count, tenants))
    remote.merge([late], 0.0)
    assert remote.received_total == count
    remote.merge([late], 0.0)
    assert remote.received_total == count


def test_a_report_names_the_tenants_with_the_most_unreported_service_first() -> None:
    source = _Source(max_tenants=2)
    for name, amount in zip("abcd", (1.0, 30.0, 2.0, 40.0), strict=True):
        source.serve(name, amount)
    source.report()
    source.report()
    named = [{one.tenant_id for one in report.report.tenants} for report in source.reports]
    assert named == [set(), {"b", "d"}, {"a", "c"}]


# ── counters ──


def test_service_elsewhere_puts_a_tenant_at_most_the_bound_and_one_addition_ahead() -> None:
    counters = TenantCounters()
    for _ in range(50):
        counters.add_remote_service("a", 100.0, most_ahead=250.0)
    account = counters.get("a")
    assert account is not None
    assert account.counter == 350.0
    assert account.own_service == 0.0, "it is not reported as service of this replica"


@pytest.mark.parametrize("policy", ["vtc", "dlpm", "moiety"])
def test_a_tenant_alone_on_a_replica_uses_it_whatever_it_got_elsewhere(make_replica: MakeReplica, policy: str) -> None:
    plain, charged = make_replica(policy), make_replica(policy)
    for replica in (plain, charged):
        for _ in range(20):
            replica.add(8, tenant="a", output=4, service=FLEX)
    for _ in range(16):
        charged.scheduler.policy.add_remote_service(FLEX.rank, "a", 1e6, 0.0)
        plain.step()
        charged.step()
    assert charged.started == plain.started
    assert charged.prefill_rows == plain.prefill_rows


def test_only_policies_with_counters_exchange_service() -> None:
    assert {name for name in POLICIES if counts_tenant_service(name)} == {"moiety", "vtc", "dlpm"}


# ── several replicas ──


class _Fleet:
    """Replicas whose tenants are always backlogged, and the reports between them."""

    def __init__(
        self,
        make_replica: MakeReplica,
        policy: str,
        tenants: dict[str, tuple[int, ...]],
        *,
        exchanges: bool = True,
        num_blocks: int = NUM_BLOCKS,
        usual: tuple[int, int] = (LONGEST_PROMPT, 3),  # prompt and output tokens of other tenants than "a"
    ) -> None:
        self.make = lambda: make_replica(policy, num_blocks=num_blocks, max_running=6)
        self.policy = policy
        self.tenants = tenants
        self.requests = dict.fromkeys(tenants, usual) | {"a": A_REQUEST}
        self.replicas: list[Any] = []
        self.owners: list[dict[int, str]] = []
        self.exchanges: list[ServiceExchange] = []
        self.num_exchanges = 0
        self.is_exchanging = exchanges
        for _ in range(1 + max(max(replicas) for replicas in tenants.values())):
            self.join()

    def join(self) -> None:
        replica = self.make()
        if self.replicas:
            replica.now_ns = self.replicas[0].now_ns
        self.exchanges.append(ServiceExchange(replica.scheduler.policy, self.policy, period_s=PERIOD_S))
        self.replicas.append(replica)
        self.owners.append({})

    def run(self, seconds: float) -> None:
        until_ns = max(replica.now_ns for replica in self.replicas) + round(seconds * 1e9)
        for index, replica in enumerate(self.replicas):
            while replica.now_ns < until_ns:
                self._top_up(index)
                replica.step()
        if self.is_exchanging:
            self._exchange(until_ns / 1e9)

    def _exchange(self, now_s: float) -> None:
        reports = [(f"e{index}", one.take_report(now_s)) for index, one in enumerate(self.exchanges)]
        for index, one in enumerate(self.exchanges):
            others = [ReplicaService(name, r) for name, r in reports if r is not None and name != f"e{index}"]
            one.receive(others, now_s)

    def _top_up(self, index: int) -> None:
        replica, owners = self.replicas[index], self.owners[index]
        waiting = [owners[key] for key in replica.scheduler.queues.waiting]
        for name, places in self.tenants.items():
            prompt, output = self.requests[name]
            for _ in range(4 - waiting.count(name) if index in places else 0):
                owners[replica.add(prompt, tenant=name, output=output, service=FLEX)] = name

    def service(self) -> dict[str, int]:
        """Return each tenant's service over all replicas: prompt tokens of started requests, and twice the outputs."""
        found = dict.fromkeys(self.tenants, 0)
        for replica, owners in zip(self.replicas, self.owners, strict=True):
            for key in replica.started:
                found[owners[key]] += self.requests[owners[key]][0] + 2 * len(replica.outputs[key])
        return found


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_tenants_backlogged_everywhere_differ_by_the_bound_of_vtc_and_one_exchange_period(
    make_replica: MakeReplica, num_replicas: int
) -> None:
    everywhere = tuple(range(num_replicas))
    fleet = _Fleet(make_replica, "vtc", {"a": everywhere, "b": everywhere, "c": everywhere})
    before = fleet.service()
    for _ in range(24):
        fleet.run(PERIOD_S)
        now = fleet.service()
        of_a_period = sum(now.values()) - sum(before.values())
        before = now
        assert max(now.values()) - min(now.values()) <= VTC_BOUND + of_a_period


@pytest.mark.parametrize(
    ("num_blocks", "usual"),
    [
        pytest.param(NUM_BLOCKS, (LONGEST_PROMPT, 3), id="limit is memory"),
        pytest.param(16 * NUM_BLOCKS, A_REQUEST, id="limit is slots"),
    ],
)
@pytest.mark.parametrize("policy", ["vtc", "moiety", "dlpm"])
def test_a_tenant_that_sends_to_all_replicas_gets_no_more_than_those_that_send_to_one(
    make_replica: MakeReplica, policy: str, num_blocks: int, usual: tuple[int, int]
) -> None:
    tenants = {"a": (0, 1, 2), "b": (0,), "c": (1,), "d": (2,)}
    grown = {}
    for exchanges in (True, False):
        fleet = _Fleet(make_replica, policy, tenants, exchanges=exchanges, num_blocks=num_blocks, usual=usual)
        for _ in range(8):
            fleet.run(PERIOD_S)
        before = fleet.service()
        for _ in range(16):
            fleet.run(PERIOD_S)
        grown[exchanges] = {name: service - before[name] for name, service in fleet.service().items()}
    fair, alone = grown[True], grown[False]
    assert alone["a"] > 1.6 * max(alone[name] for name in "bcd"), "without the exchange, it gets a share on each"
    assert fair["a"] < 1.4 * min(fair[name] for name in "bcd")
    assert fair["a"] > 0.7 * max(fair[name] for name in "bcd")


@pytest.mark.parametrize("policy", ["vtc", "moiety", "dlpm"])
def test_no_tenant_starves_when_a_replica_with_empty_counters_joins(make_replica: MakeReplica, policy: str) -> None:
    fleet = _Fleet(make_replica, policy, {"a": (0, 1, 2), "b": (0, 2), "c": (1, 2)})
    fleet.replicas.pop(), fleet.exchanges.pop(), fleet.owners.pop()
    for _ in range(20):
        fleet.run(PERIOD_S)
    fleet.join()
    before = fleet.service()
    for _ in range(6):
        fleet.run(PERIOD_S)
    started = [fleet.owners[2][key] for key in fleet.replicas[2].started]
    assert set(started) == {"a", "b", "c"}
    grown = {name: service - before[name] for name, service in fleet.service().items()}
    assert max(grown.values()) < 2 * min(grown.values())
