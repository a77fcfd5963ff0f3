"""The admin API's answers as frames and words, from answers written by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd

from moiety_dashboard import charts, colours, formatting, waterfall
from moiety_dashboard.cli import server_options
from moiety_dashboard.frames import attribution, changes, fleet, series, simulations, traces
from moiety_dashboard.frames.quotes import quotes_frame
from moiety_dashboard.frames.tenants import keys_frame, tenants_frame
from moiety_dashboard.settings import read_settings
from moiety_dashboard.views.quotas import quarantined_usage
from moiety_dashboard.views.windows import LIVE
from moiety_platform.db.base import Base
from moiety_platform.db.tables import load_tables

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
CLASS: dict[str, Any] = {
    "name": "standard", "num_waiting": 2, "num_running": 3, "predicted_ttft_s": 0.5, "admitted_total": 9,
    "rejected_total": {"late": 2, "shed": 1}, "downgraded_total": 4, "preempted_total": {}, "demoted_total": 0,
    "boosted_total": 0, "recomputed_tokens_total": 0, "oldest_waiting_unix_s": 0.0,
}  # fmt: skip
LOAD: dict[str, Any] = {
    "engine_id": "e", "num_running": 3, "num_waiting": 1, "num_paused": 0, "kv_blocks_total": 200,
    "kv_blocks_used": 50, "kv_blocks_cached": 20, "prompt_tokens_total": 8, "cached_tokens_total": 2,
    "output_tokens_total": 9, "steps_total": 5, "requests_total": 4, "running_for_s": 60.0, "classes": [CLASS],
    "prefill_seconds_total": 3.0, "decode_seconds_total": 8.0, "tenant_kv_blocks": {"t": 30, "u": 20},
}  # fmt: skip
TERMS: dict[str, Any] = {
    "name": "standard", "ttft_s": 2.0, "ttft_per_1k_s": 0.2, "tpot_s": 0.1, "completion_s": None, "weight": 1.0,
    "rank": 1, "price_factor": 1.0, "on_overload": "reject",
}  # fmt: skip


def test_the_filter_of_the_audit_log_names_only_kinds_that_the_gateway_logs() -> None:
    load_tables()
    assert set(changes.KINDS) - set(Base.metadata.tables) == {"engines"}
    assert {"tenants", "adapters", "routes", "guardrails", "jwt_issuers", "declarations"} <= set(changes.KINDS)


def test_quotes_have_the_share_of_met_guarantees_and_ratios_that_may_be_missing() -> None:
    ratios = {"p10": 0.5, "median": 1.0, "p90": 2.0}
    quoted = {
        "service_class": "standard", "requests": 5, "num_guarantees": 4, "num_guarantees_met": 3,
        "credit_nanodollars": 2_500_000_000, "credit_reasons": {"ttft": 1}, "ttft_ratio": ratios,
        "duration_ratio": None,
    }  # fmt: skip
    row = quotes_frame([quoted]).iloc[0]
    assert (row["met"], row["missed"], row["reasons"], row["credit"]) == (0.75, 1, "ttft 1", 2.5)
    assert (row["ttft_median"], row["ttft_p90"], row["duration_p90"]) == (1.0, 2.0, None)
    assert quotes_frame([]).empty


def engine(**changed: Any) -> dict[str, Any]:
    card = {"model": "m", "device": "cpu", "dtype": "float32"}
    usual: dict[str, Any] = {
        "address": "ipc://a",
        "healthy": True,
        "draining": False,
        "reason": "",
        "card": card,
        "load": LOAD,
    }
    return usual | changed


def minute_sum(at: str, group: dict[str, Any] | None = None, **totals: Any) -> dict[str, Any]:
    names = ("requests", "failed", "rejected", "disconnected", "prompt_tokens", "cached_tokens", "output_tokens")
    counts = dict.fromkeys((*names, "good_tokens", "preemptions", "num_slo_attained", "num_slo_requests"), 0)
    means = {"mean_ttft_ms": None, "mean_queue_ms": None, "mean_duration_ms": None}
    return {"at": at, "group": group or {"service_class": "standard"}, "totals": counts | means | totals}


def test_an_engine_shows_its_load_as_shares_of_its_memory() -> None:
    row = fleet.engines_frame([engine()]).iloc[0]
    assert (row["state"], row["running"], row["kv_used"], row["kv_cached"], row["hit_rate"]) == (
        *("ready", 3, 0.25, 0.1, 0.25),
    )


def test_an_engine_that_never_reported_is_away_with_its_reason_and_no_figures() -> None:
    row = fleet.engines_frame([engine(healthy=False, reason="no answer", card=None, load=None)]).iloc[0]
    assert row["state"] == "unavailable: no answer"
    assert row["kv_used"] is None


def test_engines_are_added_up_and_those_that_are_away_are_left_out() -> None:
    both = [engine(), engine(healthy=False)]
    assert fleet.fleet(both)["num_running"] == 3
    assert fleet.class_loads([*both, engine()])["standard"]["rejected"] == 6


def test_tokens_a_second_are_told_between_two_heartbeats_of_one_engine() -> None:
    later = LOAD | {"output_tokens_total": 29}
    assert fleet.rates(LOAD, later, 2.0)["output_tokens_total"] == 10.0
    assert fleet.rates(LOAD, later | {"engine_id": "another"}, 2.0) is None


def test_step_time_between_two_samples_is_split_into_prefill_and_decode() -> None:
    at_s = NOON.timestamp()
    later = LOAD | {"prefill_seconds_total": 4.5, "decode_seconds_total": 8.6}
    frame = fleet.time_frame({"ipc://a": [(at_s, LOAD), (at_s + 3, later)]}, NOON)
    assert dict(zip(frame["kind"], frame["share"].round(6), strict=True)) == {"prefill": 0.5, "decode": 0.2}
    anew = later | {"engine_id": "another"}
    assert fleet.time_frame({"ipc://a": [(at_s, LOAD), (at_s + 3, anew)]}, NOON).empty
    assert fleet.time_frame({"ipc://a": [(at_s - 9, LOAD), (at_s - 6, later)]}, NOON).empty


def test_samples_of_several_engines_within_seconds_are_one_point() -> None:
    at_s = NOON.timestamp()
    more = LOAD | {"num_waiting": 4, "kv_blocks_used": 150}
    seen = {"ipc://a": [(at_s, LOAD), (at_s + 3, more)], "ipc://b": [(at_s + 1, LOAD)]}
    assert fleet.over_time(seen, "num_waiting") == [2, 4]
    assert fleet.over_time(seen, "kv_blocks_used", "kv_blocks_total") == [0.25, 0.75]


def test_a_class_tells_since_when_the_oldest_waits_at_any_engine() -> None:
    def loaded(came_s: float) -> dict[str, Any]:
        return engine(load=LOAD | {"classes": [CLASS | {"oldest_waiting_unix_s": came_s}]})

    now_s = NOON.timestamp()
    engines = [loaded(now_s - 2), loaded(now_s - 7.5), loaded(0.0)]
    assert fleet.classes_frame([TERMS], [], engines, NOON).iloc[0]["oldest_s"] == 7.5
    assert fleet.classes_frame([TERMS], [], [loaded(0.0)], NOON).iloc[0]["oldest_s"] is None, "nobody waits"


def test_tenants_are_ordered_by_memory_with_their_savings() -> None:
    group = {"tenant_id": "u", "tenant_name": "umbrella"}
    sums = [minute_sum("", group, prompt_tokens=8, cached_tokens=2), minute_sum("", group, prompt_tokens=2)]
    sums.append(minute_sum("", {"tenant_id": "v", "tenant_name": "vandelay"}, prompt_tokens=5))
    frame = fleet.memory_frame([engine(), engine(healthy=False)], sums).set_index("tenant")
    assert list(frame.index) == ["t", "umbrella", "vandelay"]
    assert list(frame["kv_share"]) == [0.15, 0.1, 0.0]
    assert tuple(frame.loc["umbrella", ["prompt_tokens", "hit_rate"]]) == (10, 0.2)


def test_a_class_shows_its_slo_its_attainment_and_the_burn_rate_of_its_error_budget() -> None:
    sums = [minute_sum("", num_slo_attained=98, num_slo_requests=100)]
    row = fleet.classes_frame([TERMS], sums, [engine()], NOON).iloc[0]
    assert row["slo"] == "TTFT ≤ 2 s + 0.2 s/1k, TPOT ≤ 100 ms"
    assert (row["attainment"], round(row["burn"], 6), row["waiting"], row["predicted_ms"]) == (0.98, 2.0, 2, 500)


def test_tenants_have_their_share_of_the_tokens_beside_what_their_weight_entitles_them_to() -> None:
    usual = {"service_class": "standard", "status": "active"}
    tenants = [
        usual | {"id": name, "name": name, "weight": weight} for name, weight in (("a", 3.0), ("b", 1.0), ("c", 9.0))
    ]
    totals: dict[str, Any] = {
        "requests": 4,
        "failed": 1,
        "rejected": 0,
        "output_tokens": 5,
        "cost_nanodollars": 0,
        "attainment": 1.0,
    }
    totals |= {"mean_ttft_ms": 12.5}
    prompts = {"a": 10, "b": 40}  # the busiest is who used most tokens of both kinds
    usage = [{"group": {"tenant_id": name}, "totals": totals | {"prompt_tokens": prompts[name]}} for name in "ab"]
    frame = tenants_frame(tenants, usage)
    assert list(frame["tenant"]) == ["b", "a", "c"], "who used nothing comes last"
    assert list(frame["share"]) == [0.75, 0.25, 0.0]
    assert list(frame["entitled"])[:2] == [0.25, 0.75], "and takes part in no share"


def test_only_changed_fields_of_edited_classes_are_sent() -> None:
    flex = TERMS | {"name": "flex", "ttft_s": None, "tpot_s": None, "completion_s": 600.0, "rank": 2}
    classes = [one | {"max_queue_s": 30.0, "preemptible": True, "downgrade_to": None} for one in (TERMS, flex)]
    frame = simulations.terms_frame(classes)
    assert simulations.changes(classes, frame) == {}
    frame.loc[0, "ttft_s"], frame.loc[0, "rank"] = 1.5, 3
    frame.loc[1, "completion_s"], frame.loc[1, "weight"] = None, None
    assert simulations.changes(classes, frame) == {
        "standard": {"ttft_s": 1.5, "rank": 3},
        "flex": {"completion_s": None},  # a weight that always exists
    }


def test_simulation_results_are_compared_side_by_side() -> None:
    spread = {"p50": 0.1, "p90": 0.2, "p99": 0.3}
    of_class = dict.fromkeys(("attainment", "demand_share"), 1.0) | {"ttft_s": spread, "tpot_s": dict.fromkeys(spread)}
    of_class |= dict.fromkeys(("num", "num_rejected", "num_downgraded", "num_preemptions", "longest_wait_s"), 2.0)
    names = ("attainment", "offered_fraction_of_capacity", "completed_fraction_of_capacity", "kv_used_fraction")
    more = ("goodput_fraction_of_capacity", "wasted_prefill_fraction", "recomputed_fraction", "num_requests")
    now: dict[str, Any] = dict.fromkeys(
        (*names, *more, "throughput_tokens_per_s", "preemptions", "longest_wait_s"), 0.5
    )
    now["classes"] = {"standard": of_class}
    result: dict[str, Any] = {"now": now, "then": now | {"longest_wait_s": 90.0}}
    frame = simulations.sides_frame(result)
    assert list(zip(frame["class"], frame["side"], strict=True)) == [("standard", "Current"), ("standard", "Simulated")]
    assert list(frame["ttft_p99_s"]) == [0.3, 0.3]
    totals = simulations.totals_frame(result).set_index("figure")
    assert tuple(totals.loc["Longest queue time"]) == ("500 ms", "90.0 s")
    assert tuple(totals.loc["Rejected"]) == ("2", "2")
    figure, sides = charts.Figure("attainment", "kept", ".1%"), list(simulations.SIDES.values())
    drawn = str(charts.sides(frame, figure, colours.of_classes(["standard"]), sides).to_dict())
    assert colours.SHIPPED["standard"] in drawn
    assert "'domain': ['Current', 'Simulated']" in drawn and "'now'" not in drawn


def test_keys_are_shown_by_what_they_are_for_and_never_whole() -> None:
    usual: dict[str, Any] = {
             "hint": "wxyz", "name": "ci", "status": "active", "created_at": "2026-01-01T10:00:00Z", "expires_at": None,
             "allowed_models": None, "role": None, "project_id": "p", "scopes": ["inference"], "user_id": None,
             "details": None}  # fmt: skip
    keys = [usual | {"id": "k1"}, usual | {"id": "k2", "project_id": None, "role": "viewer"}]
    frame = keys_frame(keys, [{"id": "p", "name": "web"}], UTC)
    assert list(frame["for"]) == ["web", "administration (viewer)"]
    assert list(frame["key"]) == ["…wxyz"] * 2


def test_minutes_become_rates_and_the_one_of_now_is_told_by_the_time_so_far() -> None:
    sums = [
        minute_sum(
            "2026-01-01T11:59:00Z", requests=4, rejected=1, output_tokens=120, good_tokens=60, num_slo_requests=0
        ),
        minute_sum("2026-01-01T12:00:00Z", requests=1, output_tokens=120, num_slo_attained=1, num_slo_requests=2),
    ]
    frame = series.minutes_frame(sums, timedelta(minutes=1), NOON + timedelta(seconds=30))
    assert list(frame["tokens_per_s"]) == [2.0, 4.0]
    assert list(frame["good_per_s"]) == [1.0, 0.0]
    assert pd.isna(frame["attainment"][0])
    assert frame["attainment"][1] == 0.5
    ended = series.outcomes(frame)
    assert set(zip(ended["outcome"], ended["per_minute"], strict=True)) == {
        ("served", 3.0),
        ("rejected", 1.0),
        ("served", 2.0),
    }


def test_changes_are_told_field_by_field() -> None:
    entry: dict[str, Any] = {
             "seq": 1, "at": "2026-01-01T10:00:00Z", "actor": "k1", "actor_role": "owner", "action": "change",
             "object_kind": "quotas", "object_id": "q", "erased_at": None,
             "before": {"cap": 5, "kind": "x"}, "after": {"cap": 7000, "kind": "x"}}  # fmt: skip
    row = changes.audit_frame([entry], {"k1": "ops …abcd"}).iloc[0]
    assert (row["change"], row["actor"]) == ("cap: 5 → 7,000", "ops …abcd")
    quota = {"level": "tenant", "scope_id": "ten_a", "kind": "tokens_per_day", "cap": 5}
    made, names = entry | {"before": None, "after": quota}, {"ten_a": "acme"}
    assert [changes.in_words(made, known) for known in (names, {})] == [
        "tenant acme tokens_per_day 5", "tenant tokens_per_day 5",
    ]  # fmt: skip
    more = entry | {"before": quota, "after": quota | {"cap": 6}}
    assert changes.in_words(more, names) == "tenant acme tokens_per_day, cap: 5 → 6"
    assert row["kind"] == "quotas"
    kind = {"kind": "money_per_month", "ends_at": None}
    budget = {
        "before": kind | {"cap": 2 * 10**9},
        "after": {"cap": 15 * 10**8, **kind, "ends_at": "2026-01-01T10:00:00.5Z"},
    }
    assert changes.in_words(entry | budget, {}) == "cap: $2.00 → $1.50, ends_at: none → 2026-01-01 10:00:00 UTC"
    user = {"before": None, "after": {"name": "", "email": "ada@example.com", "role": "viewer"}}
    assert changes.in_words(entry | user, {}) == "ada@example.com viewer"


def test_minutes_without_requests_are_zeros_of_a_history() -> None:
    sums = [
        minute_sum("2026-01-01T11:56:00Z", output_tokens=120),
        minute_sum("2026-01-01T11:58:00Z", output_tokens=60),
    ]
    minute, now = timedelta(minutes=1), NOON + timedelta(seconds=30)
    frame = series.minutes_frame(sums, minute, now)
    assert series.history(frame, "tokens_per_s", 5 * minute, minute, now) == [0.0, 2.0, 0.0, 1.0, 0.0, 0.0]
    assert series.history(frame.head(0), "tokens_per_s", 5 * minute, minute, now) == []


def test_a_class_keeps_its_colour_wherever_it_is_shown() -> None:
    both = colours.of_classes(["standard", "gold", "batch"])
    assert colours.of_classes(["batch"])["batch"] == both["batch"]
    assert len(set(both.values())) == 3
    span = LIVE[1].span(NOON)
    frame = series.minutes_frame([minute_sum("2026-01-01T11:59:00Z", output_tokens=6)], timedelta(minutes=1), NOON)
    chart = charts.stacked(frame, charts.Figure("tokens_per_s", "tokens/s"), "class", both, span).to_dict()
    assert chart["encoding"]["color"]["scale"] == {"domain": ["standard"], "range": [both["standard"]]}
    assert chart["encoding"]["y"]["title"] == "tokens/s"


def test_the_axis_of_a_share_goes_up_to_all_of_it_and_down_below_the_lowest() -> None:
    assert [round(charts.share_floor(lowest), 1) for lowest in (1.0, 0.97, 0.84, 0.35, 0.0)] == [
        0.8,
        0.8,
        0.7,
        0.2,
        0.0,
    ]


def test_windows_are_whole_slots_up_to_now() -> None:
    span = LIVE[3].span(NOON + timedelta(minutes=5))
    assert (span.until, span.since, span.num_slots) == (NOON + timedelta(hours=1), NOON - timedelta(hours=23), 24)


def test_numbers_are_written_for_people() -> None:
    short = [formatting.short(number) for number in (0, 9_999, 12_345, 1_200_000, 3.2e9, 0.25, 0.033, None)]
    assert short == ["0", "9,999", "12.3 k", "1.2 M", "3.2 G", "0.2", "0.03", "–"]
    shares = [formatting.percent(share) for share in (0.25, 1.0, 0.99996, 0, None)]
    assert shares == ["25.0 %", "100 %", "99.99 %", "0 %", "–"], "all but nothing is not all"
    assert [formatting.time_left(seconds) for seconds in (30, 5400, 3 * 86_400)] == [
        "under a minute",
        "1 h 30 min",
        "3 d 0 h",
    ]
    assert [formatting.dollars(nano) for nano in (2_500_000_000, 1_234, 0)] == ["$2.50", "$0.000001", "$0.00"]


def test_settings_come_from_arguments_before_the_environment_and_hold_no_key() -> None:
    environment = {"MOIETY_URL": "http://one:1", "MOIETY_ADMIN_KEY": "mty_a.b"}
    assert read_settings([], environment).gateway_url == "http://one:1"
    settings = read_settings(["--gateway", "http://two:2/"], environment)
    assert settings.gateway_url == "http://two:2"
    assert "mty_" not in repr(settings)


def test_the_theme_has_a_light_and_a_dark_side() -> None:
    options = server_options("127.0.0.1", 8501)
    grounds = {options[f"theme_{side}_backgroundColor"] for side in ("light", "dark", "light_sidebar", "dark_sidebar")}
    assert len(grounds) == 4


def span(name: str, start_ms: int, end_ms: int, parent_id: str | None = "root", **changed: Any) -> dict[str, Any]:
    begin = 10**18
    usual: dict[str, Any] = {
        "span_id": name, "parent_id": parent_id, "name": name, "service": "moiety-gateway", "status": "unset",
        "start_ns": begin + start_ms * 10**6, "end_ns": begin + end_ms * 10**6, "events": [], "links": [],
        "attributes": {"moiety.request_id": "r", "moiety.tenant_id": "t"},
    }  # fmt: skip
    return usual | changed


def test_spans_stand_under_what_they_are_part_of_in_the_order_of_time() -> None:
    failed = span("answer", 4, 9, status="error", attributes={"error.type": "engine_failed"})
    event: dict[str, Any] = {
        "name": "moiety.failed_over",
        "unix_ns": 10**18 + 6 * 10**6,
        "attributes": {"moiety.reason": "died"},
    }
    root = span("root", 0, 10, "of-a-client", events=[event])
    frame = traces.bars_frame([failed, span("engine.decode", 5, 8, "answer"), span("receive", 0, 4), root])
    assert [label.strip("· ") for label in frame["label"]] == ["root", "receive", "answer", "engine.decode"]
    assert [label.count("·") for label in frame["label"]] == [0, 1, 1, 2]
    assert list(frame["who"]) == ["gateway", "gateway", "error", "engine"]
    assert list(frame["start_ms"]) == [0, 0, 4, 5]
    assert frame["attributes"][2] == "error.type: engine_failed"
    (happened,) = traces.events_frame([failed, root]).to_dict("records")
    assert (happened["event"], happened["reason"], happened["at_ms"], happened["row"]) == ("failed over", "died", 6, 0)


def test_a_step_tells_its_batch_and_how_it_was_predicted() -> None:
    said: dict[str, Any] = {
        "number": 7, "decodes": 3, "prefills": 1, "prefill_tokens": 40, "preempted": 2, "output_tokens": 4,
        "waiting": 5, "kv_blocks_used": 25, "kv_blocks_total": 100, "classes": ["3 batch", "1 flex"],
        "predicted_s": 0.004, "active_experts": 5.5, "balancedness": 0.25,
    }  # fmt: skip
    attributes = {f"moiety.step.{name}": value for name, value in said.items()} | {"moiety.engine": "ipc://a"}
    linked = [{"trace_id": "x", "span": span("engine.step", 5, 10, None, attributes=attributes)}]
    (row,) = traces.steps_frame(linked, 10**18).to_dict("records")
    assert (row["took_ms"], row["predicted_ms"], row["kv_used"], row["classes"]) == (5, 4, 0.25, "3 batch, 1 flex")
    assert (row["active_experts"], row["balancedness"]) == (5.5, 0.25)
    chart = waterfall.steps(traces.steps_frame(linked, 10**18), 20.0).to_dict()
    (drawn,) = chart["datasets"].values()
    assert [(one["part"], one["from"], one["to"]) for one in drawn] == [("decodes", 0, 3), ("prompt tokens", 3, 43)]


def test_a_trace_without_a_request_of_ours_is_shown_too() -> None:
    frame = traces.bars_frame([span("checkout", 0, 3, None, attributes={"items": 3})])
    assert (list(frame["who"]), traces.requests_of([])) == (["other services"], [])
    assert traces.events_frame([span("checkout", 0, 3, None)]).empty
    assert traces.found_frame([], {}).empty


def test_an_axis_has_numbers_whatever_it_shows() -> None:
    for values, ends in (([30, 70], (10, 100)), ([0.4, 1200], (0.1, 10_000)), ([10], (10, 100)), ([0.0], (1, 10))):
        assert charts.decades(pd.Series(values, dtype=float)) == ends
    span = charts.Span(NOON, NOON + timedelta(minutes=1), timedelta(minutes=1))
    frame = pd.DataFrame([{"slot": NOON, "engine": "a", "running": 0}])
    drawn = charts.lines(frame, charts.Figure("running", "sequences"), "engine", {"a": "#000000"}, span).to_dict()
    assert drawn["encoding"]["y"]["scale"]["domain"] == [0, 1]
    ms = charts.lines(
        frame.assign(running=40), charts.Figure("running", "ms", is_log=True), "engine", {}, span
    ).to_dict()
    assert ms["encoding"]["y"]["axis"]["values"] == [10, 30, 100]


def test_an_address_is_shown_by_its_end() -> None:
    assert formatting.short_address("tcp://127.0.0.1:5757") == "tcp://127.0.0.1:5757"
    assert formatting.short_address("ipc:///var/lib/moiety/data/run/engine.sock").endswith("/run/engine.sock")
    assert len(formatting.short_address("ipc://" + "x" * 99)) == 28


def test_no_line_is_drawn_over_minutes_in_which_nothing_ended() -> None:
    minute = timedelta(minutes=1)
    slots = [("a", 0), ("a", 1), ("a", 5), ("b", 0), ("b", 1)]
    frame = pd.DataFrame([{"slot": NOON + at * minute, "class": name, "ttft_ms": 5.0} for name, at in slots])
    drawn = charts.with_gaps(frame, "ttft_ms", "class", minute)
    assert list(drawn[drawn["ttft_ms"].isna()]["slot"]) == [NOON + 2 * minute]
    assert len(drawn) == 6
    assert charts.with_gaps(frame, "ttft_ms", "class", timedelta(0)) is frame, "looks come when they come"


def test_quarantined_usage_stands_among_what_does_not_agree() -> None:
    found = {"quarantined_usage": {"rows": 2, "unreadable_lines": 1, "shown": []}}
    assert [(one["record"], one["found"]) for one in quarantined_usage(found)] == [
        ("quarantined usage rows", "2"),
        ("unreadable usage lines", "1"),
    ]
    assert quarantined_usage({"quarantined_usage": {"rows": 0, "unreadable_lines": 0}}) == quarantined_usage({}) == []


# ── usage by end user and tag ──


def attributed(group: dict[str, Any], prompt_tokens: int, **totals: Any) -> dict[str, Any]:
    counts = {"requests": 1, "failed": 0, "cached_tokens": 0, "output_tokens": 0, "cost_nanodollars": 2_000_000_000}
    return {"group": group, "totals": counts | {"prompt_tokens": prompt_tokens} | totals}


def test_end_users_come_by_their_tokens_with_their_share_and_cost_and_requests_without_one() -> None:
    groups = [attributed({"end_user": None}, 25), attributed({"end_user": "a"}, 10, output_tokens=65)]
    frame = attribution.attribution_frame(groups, "end_user")
    assert list(frame["name"].fillna("-")) == ["a", "-"] and list(frame["share"]) == [0.75, 0.25]
    assert list(frame["cost"]) == [2.0, 2.0]
    assert attribution.attribution_frame([], "tag:team").empty


def test_hours_and_days_of_each_name_are_added_up_by_the_day() -> None:
    since = NOON.replace(hour=0)
    hours = {
        "a": [attributed({"hour": (since + timedelta(hours=at)).isoformat()}, 10) for at in (1, 23, 24)],
        "b": [attributed({"day": f"{since + timedelta(days=1):%Y-%m-%d}"}, 7)],
    }
    frame = attribution.slots_frame(hours, since, timedelta(days=1))
    told = list(frame.itertuples(index=False, name=None))
    day = timedelta(days=1)
    assert told == [(since, "a", 20, 4.0), (since + day, "a", 10, 2.0), (since + day, "b", 7, 2.0)]


def test_the_names_of_tags_come_by_how_often_requests_have_them() -> None:
    requests = [{"tags": {"team": "x", "app": "y"}}, {"tags": {"team": "z"}}, {"tags": {}}]
    assert attribution.tag_names(requests) == ["team", "app"]
