"""The order of the policies `vtc` and `dlpm`, and how evenly they serve tenants."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

BLOCK_SIZE = 4
MakeReplica = Callable[..., Any]


# ── vtc ──


def _shares(replica: Any, tenants: dict[int, str], num: int) -> dict[str, int]:
    """Return the number of each tenant's requests among the first `num` that started."""
    first = [tenants[key] for key in replica.started[:num]]
    return {name: first.count(name) for name in sorted(set(tenants.values()))}


@pytest.mark.parametrize("policy", ["vtc", "dlpm"])
def test_a_tenant_that_floods_the_queue_leaves_half_to_another(make_replica: MakeReplica, policy: str) -> None:
    replica = make_replica(policy, max_running=2)
    tenants = {replica.add(24, tenant="a", output=8): "a" for _ in range(60)}
    tenants |= {replica.add(24, tenant="b", output=8): "b" for _ in range(20)}
    replica.run()
    shares = _shares(replica, tenants, 40)
    assert abs(shares["a"] - shares["b"]) <= 2


@pytest.mark.parametrize("policy", ["vtc", "dlpm"])
def test_tenants_are_served_in_proportion_to_their_weights(make_replica: MakeReplica, policy: str) -> None:
    replica = make_replica(policy, max_running=2)
    tenants = {}
    for _ in range(60):
        tenants[replica.add(24, tenant="a", output=8)] = "a"
        tenants[replica.add(24, tenant="b", output=8, weight=3.0)] = "b"
    replica.run()
    shares = _shares(replica, tenants, 40)
    assert 2.5 <= shares["b"] / shares["a"] <= 3.5


def test_vtc_counts_output_twice(make_replica: MakeReplica) -> None:
    replica = make_replica("vtc", max_running=1)
    tenants = {}
    for _ in range(30):
        tenants[replica.add(20, tenant="reads", output=1)] = "reads"  # 22 a request
        tenants[replica.add(2, tenant="writes", output=10)] = "writes"  # 22 as well
    replica.run()
    shares = _shares(replica, tenants, 20)
    assert abs(shares["reads"] - shares["writes"]) <= 1


def test_vtc_is_fair_within_its_bound_while_both_are_backlogged(make_replica: MakeReplica) -> None:
    replica = make_replica("vtc", max_running=6, num_blocks=32)
    tenants = {}
    for _ in range(40):
        tenants[replica.add(8, tenant="a", output=20)] = "a"
        tenants[replica.add(30, tenant="b", output=3)] = "b"
    bound = 2 * max(30, 2 * 32 * BLOCK_SIZE)
    worst = 0.0
    while replica.scheduler.queues.waiting and {tenants[key] for key in replica.scheduler.queues.waiting} == {"a", "b"}:
        replica.step()
        served = {"a": 0, "b": 0}
        for key in replica.started:
            prompt = 8 if tenants[key] == "a" else 30
            served[tenants[key]] += prompt + 2 * len(replica.outputs[key])
        worst = max(worst, abs(served["a"] - served["b"]))
    assert 0 < worst <= bound


def test_vtc_lifts_a_tenant_that_returns_so_that_idleness_earns_nothing(make_replica: MakeReplica) -> None:
    replica = make_replica("vtc", max_running=1)
    tenants = {replica.add(20, tenant="busy"): "busy" for _ in range(40)}
    for _ in range(20):
        replica.step()
    before = len(replica.started)
    tenants |= {replica.add(20, tenant="back"): "back" for _ in range(20)}
    replica.run()
    after = [tenants[key] for key in replica.started[before : before + 10]]
    assert abs(after.count("busy") - after.count("back")) <= 1


def test_vtc_lifts_to_the_last_that_left_where_nobody_is_queued(make_replica: MakeReplica) -> None:
    replica = make_replica("vtc", max_running=1)
    for _ in range(20):
        replica.add(20, tenant="busy")
    replica.run()
    before = len(replica.started)
    tenants = {}
    for _ in range(10):
        tenants[replica.add(20, tenant="new")] = "new"
        tenants[replica.add(20, tenant="busy")] = "busy"
    replica.run()
    after = [tenants[key] for key in replica.started[before : before + 10]]
    assert abs(after.count("busy") - after.count("new")) <= 1


def test_vtc_does_not_charge_what_the_cache_held(make_replica: MakeReplica) -> None:
    replica = make_replica("vtc", max_running=1)
    prefix = list(range(200, 240))
    replica.add([*prefix, 1], tenant="warm-up")
    replica.run()
    before = len(replica.started)
    tenants = {}
    for number in range(30):
        tenants[replica.add([*prefix, number], tenant="cached")] = "cached"  # 1 + 2 a request
        tenants[replica.add(40, tenant="uncached")] = "uncached"  # 40 + 2
    replica.run()
    first = [tenants[key] for key in replica.started[before : before + 16]]
    assert first.count("cached") >= 14


def test_vtc_serves_a_tenant_by_arrival_and_lets_no_one_interrupt_a_prompt(make_replica: MakeReplica) -> None:
    replica = make_replica("vtc")
    long = replica.add(100, tenant="a")
    replica.step()
    others = [replica.add(8, tenant="b"), replica.add(8, tenant="b")]
    replica.run()
    assert replica.prefills[:4] == [[long], [long], [long], [long, *others]]


# ── dlpm ──


def test_dlpm_starts_the_longest_cached_prefix_first(make_replica: MakeReplica) -> None:
    replica = make_replica("dlpm", max_running=1)
    prefix = list(range(200, 240))
    replica.add([*prefix, 1])
    replica.run()
    keys = [replica.add(20), replica.add([*prefix[:20], 3, 4, 5]), replica.add([*prefix, 9])]
    replica.run()
    assert replica.started[1:] == [keys[2], keys[1], keys[0]]


def test_dlpm_sees_a_prefix_that_was_computed_after_the_request_had_come(make_replica: MakeReplica) -> None:
    replica = make_replica("dlpm", max_running=2, budget=41)
    prefix = list(range(200, 240))
    first, other, same = replica.add([*prefix, 1], output=30), replica.add(20), replica.add([*prefix, 2])
    replica.run()
    assert replica.started == [first, same, other]
    assert replica.finishes[same].num_cached_tokens == 40


def test_dlpm_sees_that_a_prefix_has_gone(make_replica: MakeReplica) -> None:
    replica = make_replica("dlpm", max_running=1, num_blocks=24, budget=22)  # steps that the prompt of 88 fills
    longer, shorter = list(range(200, 240)), list(range(300, 308))
    for prefix in (longer, shorter):
        replica.add([*prefix, 1])
        replica.run()
    holding = replica.add(88)
    replica.step()
    gone, kept = replica.add([*longer, 2]), replica.add([*shorter, 2])  # both are still cached
    replica.run()
    assert replica.started[2:] == [holding, kept, gone]
    assert replica.finishes[gone].num_cached_tokens == 0


def test_dlpm_passes_over_a_tenant_without_deficit_whose_prefix_is_longer(make_replica: MakeReplica) -> None:
    replica = make_replica("dlpm", max_running=1)  # the quantum is a step's 32 tokens
    prefix = list(range(200, 240))
    replica.add([*prefix, 1], tenant="local")
    replica.run()
    tenants = {}
    for number in range(30):
        tenants[replica.add([*prefix, number, number], tenant="local", output=8)] = "local"  # 2 + 16 a request
        tenants[replica.add(18, tenant="other")] = "other"  # 18 + 2
    replica.run()
    first = [tenants[key] for key in replica.started[1:25]]
    assert abs(first.count("local") - first.count("other")) <= 4
    assert max(len(list(run)) for run in _runs(first)) >= 2  # it goes by prefix as long as the deficit lasts


def _runs(names: list[str]) -> list[list[str]]:
    runs = [[names[0]]]
    for before, name in pairwise(names):
        if name == before:
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs


def test_dlpm_gives_quanta_until_one_that_is_far_below_zero_may_start(make_replica: MakeReplica) -> None:
    replica = make_replica("dlpm", max_running=1, num_blocks=512)
    keys = [replica.add(1000, tenant="a"), replica.add(1000, tenant="a")]
    replica.run()
    assert replica.started == keys
