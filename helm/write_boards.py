"""Generator of Grafana's boards in helm/moiety/boards: `python helm/write_boards.py [FOLDER]`.

Each board is Python data here and JSON there, since JSON of that length cannot be reviewed. A test compares the files
with the output of this script, and every expression with the existing metrics.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "moiety" / "boards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, HEIGHT = 24, 8
RATE = "$__rate_interval"
OF = 'model=~"$model",service_class=~"$service_class"'
MISSED = f'sum by (service_class) (rate(moiety_slo_requests_total{{{OF},attained="false"}}[{RATE}]))'
WITH_SLO = f"sum by (service_class) (rate(moiety_slo_requests_total{{{OF}}}[{RATE}]))"
ENGINE = 'engine=~"$engine"'


@dataclass(frozen=True)
class Panel:
    """One panel: its expressions with their legends, and Grafana's unit."""

    title: str
    unit: str
    lines: Sequence[tuple[str, str]]
    about: str
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    at_most_one: bool = False


def stat(title: str, unit: str, expression: str, about: str) -> Panel:
    return Panel(title, unit, [(expression, "")], about, kind="stat", width=4)


def percentiles(metric: str, labels: str, by: str = "service_class", quantiles: Sequence[float] = (0.5, 0.95)) -> Any:
    """Return lines of a histogram's quantiles."""
    inner = f"sum by ({by}, le) (rate({metric}_bucket{{{labels}}}[{RATE}]))"
    return [(f"histogram_quantile({q}, {inner})", f"{{{{{by}}}}} p{q * 100:.0f}") for q in quantiles]


def of_engine(metric: str) -> str:
    """Return a counter's rate, counted once however many gateways report it."""
    return f"max by (engine) (rate({metric}{{{ENGINE}}}[{RATE}]))"


def of_class(metric: str, by: str = "engine, service_class") -> str:
    """Return the same rate for a counter that is reported by class."""
    return f"max by ({by}) (rate({metric}{{{ENGINE}}}[{RATE}]))"


def slos() -> list[list[Panel]]:
    good = f"sum(rate(moiety_good_tokens_total{{{OF}}}[{RATE}]))"
    failed = f'sum(rate(moiety_requests_total{{{OF},outcome=~"failed|rejected"}}[{RATE}]))'
    every = f"sum(rate(moiety_requests_total{{{OF}}}[{RATE}]))"
    hour_missed = f'sum(increase(moiety_slo_requests_total{{{OF},attained="false"}}[1h]))'
    hour = f"sum(increase(moiety_slo_requests_total{{{OF}}}[1h]))"
    return [
        [
            stat("SLO attainment, 1 h", "percentunit", f"1 - {hour_missed} / {hour}",
                 "Share of requests that attained their SLO."),
            stat("Goodput", "short", good, "Output tokens per second of requests that attained their SLO."),
            stat("Requests per second", "reqps", every, "Ended requests, whatever their outcome."),
            stat("Error rate", "percentunit", f"({failed} or vector(0)) / {every}",
                 "Share of failed and rejected requests."),
            stat("Engines up", "short", "sum(max by (engine) (moiety_engine_up))", "Engines that accept requests."),
            stat("Waiting requests", "short", "sum(max by (engine) (moiety_engine_num_waiting))",
                 "Requests in the engines' queues."),
        ],
        [
            Panel("SLO attainment by class", "percentunit", [(f"1 - {MISSED} / {WITH_SLO}", "{{service_class}}")],
                  "Share of requests that attained their SLO. A rejection for overload counts "
                  "as missed.", at_most_one=True),
            Panel("Error budget burn rate by class", "short",
                  [(f"{MISSED} / {WITH_SLO} / 0.01", "{{service_class}}")],
                  "Objective 99 % over 30 days: at 1 the error budget lasts 30 days; at 14.4 an alert pages within "
                  "minutes."),
            Panel("Output tokens per second by class", "short",
                  [(f"sum by (service_class) (rate(moiety_tokens_total{{{OF},kind=\"output\"}}[{RATE}]))",
                    "{{service_class}}"), (good, "goodput")],
                  "All output, and the part of requests that attained their SLO (goodput)."),
        ],
    ]  # fmt: skip


def latencies() -> list[list[Panel]]:
    arrived = 'moiety_engine_class_oldest_waiting_timestamp_seconds{service_class=~"$service_class"}'
    return [
        [
            Panel("Time to first token (TTFT)", "s", percentiles("gen_ai_server_time_to_first_token_seconds", OF),
                  "From arrival at the gateway to the first output token."),
            Panel("Time per output token (TPOT)", "s", percentiles("gen_ai_server_time_per_output_token_seconds", OF),
                  "Mean of a request after its first token."),
            Panel("Request duration", "s", percentiles("gen_ai_server_request_duration_seconds", OF),
                  "End-to-end latency, from arrival at the gateway to the end."),
        ],
        [
            Panel("Queue time", "s", percentiles("moiety_queue_time_seconds", OF),
                  "Time in the engine's queue before scheduling."),
            Panel("Requests by outcome", "reqps",
                  [(f"sum by (outcome) (rate(moiety_requests_total{{{OF}}}[{RATE}]))", "{{outcome}}")],
                  "Ended requests by outcome.", stacked=True),
            Panel("Errors by code", "reqps",
                  [(f'sum by (code) (rate(moiety_request_errors_total{{service_class=~"$service_class"}}[{RATE}]))',
                    "{{code}}")], "Error codes, as clients receive them.", stacked=True),
        ],
        [
            Panel("Downgraded and rejected requests", "reqps",
                  [(f'sum by (outcome, reason) (rate(moiety_admission_total{{service_class=~"$service_class",'
                    f'outcome!="admitted"}}[{RATE}]))', "{{outcome}}: {{reason}}")],
                  "Admission decisions other than admitted, by reason.", stacked=True),
            Panel("Waiting requests by class", "short",
                  [('sum by (service_class) (max by (engine, service_class) '
                    '(moiety_engine_class_num_waiting{service_class=~"$service_class"}))', "{{service_class}}")],
                  "Requests in engines' queues.", stacked=True),
            Panel("Oldest waiting request by class", "s",
                  [(f"max by (service_class) ((time() - {arrived}) and {arrived} > 0)", "{{service_class}}")],
                  "Time since its arrival; no data while no request waits."),
        ],
    ]  # fmt: skip


def quotes() -> list[list[Panel]]:
    guaranteed = f"sum by (service_class) (rate(moiety_quote_guarantees_total{{{OF}}}[{RATE}]))"
    met = f'sum by (service_class) (rate(moiety_quote_guarantees_total{{{OF},met="true"}}[{RATE}]))'
    exact = "1 is exact, above 1 is later than predicted. Only requests with a quote."
    return [
        [
            Panel("Quotes: TTFT, actual ÷ predicted", "short",
                  percentiles("moiety_quote_ttft_ratio", OF, quantiles=(0.5, 0.9)), exact),
            Panel("Quotes: duration, actual ÷ predicted", "short",
                  percentiles("moiety_quote_duration_ratio", OF, quantiles=(0.5, 0.9)), exact),
            Panel("Quotes: guarantees met", "percentunit", [(f"{met} / {guaranteed}", "{{service_class}}")],
                  "Share of ended requests with a quote's guarantee.", at_most_one=True),
        ],
    ]  # fmt: skip


def batches() -> list[list[Panel]]:
    used = f"max by (engine) (moiety_engine_kv_blocks_used{{{ENGINE}}})"
    total = f"max by (engine) (moiety_engine_kv_blocks{{{ENGINE}}})"
    cached = f"max by (engine) (moiety_engine_kv_blocks_cached{{{ENGINE}}})"
    prompt = of_engine("moiety_engine_prompt_tokens_total")
    steps = of_engine("moiety_engine_steps_total")
    return [
        [
            Panel("Engine up", "bool_yes_no", [(f"max by (engine) (moiety_engine_up{{{ENGINE}}})", "{{engine}}")],
                  "0 while an engine is unreachable, draining or in sleep mode.", at_most_one=True),
            Panel("Running requests", "short",
                  [(f"max by (engine) (moiety_engine_num_running{{{ENGINE}}})", "{{engine}}")],
                  "Requests in the batch.", stacked=True),
            Panel("Waiting and paused requests", "short",
                  [(f"max by (engine) (moiety_engine_num_waiting{{{ENGINE}}})", "{{engine}} waiting"),
                   (f"max by (engine) (moiety_engine_num_paused{{{ENGINE}}})", "{{engine}} paused")],
                  "Waiting in the queue, or paused until a slow client reads on."),
        ],
        [
            Panel("KV cache usage", "percentunit", [(f"{used} / {total}", "{{engine}}")],
                  "Share of blocks that requests hold.", at_most_one=True),
            Panel("KV cache reusable", "percentunit", [(f"{cached} / {total}", "{{engine}}")],
                  "Share of blocks that are free and hold a reusable prefix.", at_most_one=True),
            Panel("Prefix cache hit rate", "percentunit",
                  [(f"{of_engine('moiety_engine_cached_tokens_total')} / {prompt}", "{{engine}}")],
                  "Share of prompt tokens read from the prefix cache.", at_most_one=True),
        ],
        [
            Panel("Prompt tokens per second", "short", [(prompt, "{{engine}}")], "", stacked=True),
            Panel("Output tokens per second", "short",
                  [(of_engine("moiety_engine_output_tokens_total"), "{{engine}}")], "", stacked=True),
            Panel("Output tokens per step", "short",
                  [(f"{of_engine('moiety_engine_output_tokens_total')} / {steps}", "{{engine}}")],
                  "Mean output tokens of a step, which grows with the batch size."),
        ],
        [
            Panel("Time in steps", "percentunit",
                  [(of_engine("moiety_engine_prefill_seconds_total"), "{{engine}} prefill"),
                   (of_engine("moiety_engine_decode_seconds_total"), "{{engine}} decode")],
                  "Share of time in steps with prompt tokens (prefill), and in steps without (decode).", width=24),
        ],
    ]  # fmt: skip


def decisions() -> list[list[Panel]]:
    by_reason = of_class("moiety_engine_class_preempted_total", "engine, service_class, reason")
    demoted = of_class("moiety_engine_class_demoted_total")
    boosted = of_class("moiety_engine_class_boosted_total")
    recomputed = of_class("moiety_engine_class_recomputed_tokens_total")
    drafted, accepted = (of_engine(f"moiety_engine_{name}_tokens_total") for name in ("drafted", "accepted"))
    rejected_drafts = f"{drafted} - {accepted}"
    return [
        [
            Panel("Preemptions", "ops", [(f"sum by (service_class, reason) ({by_reason})",
                                          "{{service_class}}: {{reason}}")],
                  "Running requests whose KV cache blocks were given to other requests.", stacked=True),
            Panel("Demoted and boosted", "ops",
                  [(f"sum by (service_class) ({demoted})", "{{service_class}} demoted"),
                   (f"sum by (service_class) ({boosted})", "{{service_class}} boosted")],
                  "Demoted: can no longer attain the SLO, scheduled last. Boosted: waited too long, scheduled first."),
            Panel("Wasted tokens", "short",
                  [(f"sum by (service_class) ({recomputed})", "{{service_class}} recomputed"),
                   (of_engine("moiety_engine_tokens_past_stop_total"), "{{engine}} past stop"),
                   (rejected_drafts, "{{engine}} rejected drafts")],
                  "Per second: recomputed after preemptions, computed past the stop, and rejected draft tokens."),
        ],
        [
            Panel("Predicted TTFT", "s",
                  [(f"max by (service_class) (moiety_engine_class_predicted_ttft_seconds{{{ENGINE}}})",
                    "{{service_class}}")], "For an empty prompt that arrives now, at the slowest engine."),
            Panel("Failovers", "ops", [(f"sum by (cause) (rate(moiety_failovers_total[{RATE}]))", "{{cause}}")],
                  "Sequences continued on another engine, by error code.", stacked=True),
            Panel("KV cache swaps to host memory", "short",
                  [(of_engine("moiety_engine_swapped_out_blocks_total"), "{{engine}} out"),
                   (of_engine("moiety_engine_swapped_in_blocks_total"), "{{engine}} in")],
                  "Blocks swapped per second."),
        ],
    ]  # fmt: skip


def usage() -> list[list[Panel]]:
    shown = "The recently busiest tenants; `other` is the sum of all others."
    return [
        [
            Panel("Requests per second by tenant", "reqps",
                  [(f"sum by (tenant) (rate(moiety_tenant_requests_total[{RATE}]))", "{{tenant}}")], shown,
                  stacked=True),
            Panel("Tokens per second by tenant", "short",
                  [(f"sum by (tenant) (rate(moiety_tenant_tokens_total[{RATE}]))", "{{tenant}}")],
                  f"Input and output. {shown}", stacked=True),
            Panel("Requests rejected with 429 by tenant", "reqps",
                  [(f"sum by (tenant) (rate(moiety_tenant_refused_total[{RATE}]))", "{{tenant}}")],
                  f"Quota exceeded, or overload. {shown}", stacked=True),
        ],
        [
            Panel("Quota leases", "short", [("sum by (instance) (moiety_quota_leases)", "{{instance}}")],
                  "Quota leases that each gateway holds."),
            Panel("Requests waiting for a quota lease", "short",
                  [("sum by (instance) (moiety_quota_waiting_requests)", "{{instance}}")],
                  "Above 0 near a cap, or while the database is slow."),
            Panel("Time since last lease renewal", "s",
                  [("max by (instance) (moiety_quota_store_age_seconds)", "{{instance}}")],
                  "Beyond 15 s the leases expire, and requests under a quota get 503."),
        ],
        [
            Panel("Leases in quarantine", "short", [("max(moiety_quota_quarantined_leases)", "leases"),
                                                    ("max(moiety_quota_quarantined_replicas)", "gateways")],
                  "Leases of crashed gateways, counted as spent until the engines report otherwise."),
            Panel("Oldest quarantine", "s", [("max(moiety_quota_quarantine_oldest_seconds)", "age")],
                  "Time since the last heartbeat of the crashed gateway that is silent longest."),
            Panel("Late charges", "ops",
                  [(f"sum(rate(moiety_ledger_charged_late_total[{RATE}]))", "requests")],
                  "Requests of crashed gateways, charged by the engines' counts."),
        ],
    ]  # fmt: skip


def ledger() -> list[list[Panel]]:
    return [
        [
            Panel("Ledger lag", "s", [("max by (instance) (moiety_ledger_lag_seconds)", "{{instance}}")],
                  "Age of the oldest usage row that is not yet in the database."),
            Panel("Pending usage rows", "short",
                  [("sum by (instance) (moiety_ledger_pending_rows)", "{{instance}} in memory"),
                   ("max by (instance) (moiety_ledger_journal_waiting)", "{{instance}} journal in use")],
                  "In memory, or in the journal on disk while the database is unavailable."),
            Panel("Usage rows", "ops", [(f"sum by (step) (rate(moiety_ledger_rows_total[{RATE}]))", "{{step}}")],
                  "By step. `refused`, rows that the database rejects, must be 0."),
        ],
        [
            Panel("SQL statements per second", "ops",
                  [(f"sum by (instance) (rate(moiety_sql_statements_total[{RATE}]))", "{{instance}}")], ""),
            Panel("Lost spans", "ops",
                  [(f"sum by (destination, reason) (rate(moiety_spans_dropped_total[{RATE}]))",
                    "{{destination}}: {{reason}}")],
                  "Sampled spans that did not reach their destination.", stacked=True),
            Panel("Process memory", "bytes",
                  [("process_resident_memory_bytes and on (instance) moiety_build_info", "{{instance}}")],
                  "Resident set size."),
        ],
    ]  # fmt: skip


@dataclass(frozen=True)
class Variable:
    """A choice at the head of a board: the values of a metric's label."""

    name: str
    metric: str


MODEL, CLASS = Variable("model", "moiety_requests_total"), Variable("service_class", "moiety_requests_total")
BOARDS = {
    "overview": ("Moiety: overview and SLOs", (slos, latencies, quotes), (MODEL, CLASS)),
    "engines": ("Moiety: engines", (batches, decisions), (Variable("engine", "moiety_engine_up"),)),
    "tenants": ("Moiety: tenants and quotas", (usage, ledger), ()),
}


def board(name: str) -> dict[str, Any]:
    """Return the board in Grafana's import form."""
    title, parts, variables = BOARDS[name]
    panels: list[dict[str, Any]] = []
    y = 0
    for row in itertools.chain.from_iterable(part() for part in parts):
        x, height = 0, 4 if all(panel.kind == "stat" for panel in row) else HEIGHT
        for one in row:
            place = {"x": x, "y": y, "w": one.width, "h": height}
            panels.append({"id": len(panels) + 1, "gridPos": place, **drawn(one)})
            x += one.width
        assert x == COLUMNS, f"{name}: a row is {x} wide"
        y += height
    return {
        "uid": f"moiety-{name}",
        "title": title,
        "tags": ["moiety"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [source_variable(), *map(chosen, variables)]},
        "panels": panels,
    }


def drawn(panel: Panel) -> dict[str, Any]:
    """Return a panel without its position."""
    targets = [
        {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
        for index, (expression, legend) in enumerate(panel.lines)
    ]
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom |= {"fillOpacity": 60, "stacking": {"mode": "normal"}}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom if panel.kind == "timeseries" else {}}
    if panel.at_most_one:
        defaults["max"] = 1
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    if panel.kind == "timeseries":
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def chosen(variable: Variable) -> dict[str, Any]:
    return {
        "name": variable.name,
        "label": variable.name.replace("_", " "),
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values({variable.metric}, {variable.name})",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def main(folder: Path) -> None:
    for name in BOARDS:
        text = json.dumps(board(name), indent=2, ensure_ascii=False) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
