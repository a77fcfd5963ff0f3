"""Generator of Prometheus' alert rules in helm/moiety/alerts/alert_rules.yaml: `python helm/write_alerts.py [FOLDER]`.

SLOs are watched as in the SRE workbook: by the burn rate of the error budget over a long window (is it serious?) and a
short one (does it continue?). Every alert has a runbook of its name in docs/runbooks.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

OUT = Path(__file__).parent / "moiety" / "alerts"
RUNBOOKS = "docs/runbooks.md"
OBJECTIVE = 0.99  # target SLO attainment of a class over 30 days
ERROR_BUDGET = round(1 - OBJECTIVE, 6)
MIN_REQUESTS = 20  # in the long window; with fewer, one miss is not significant
PAGE, TICKET = "page", "ticket"
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
# (burn rate, long window, short window): 14.4 uses 2 % of a month's budget in an hour, 6 uses 5 % in six hours
FAST = ((14.4, "1h", "5m"), (6.0, "6h", "30m"))
SLOW = ((3.0, "1d", "2h"), (1.0, "3d", "6h"))


@dataclass(frozen=True)
class Alert:
    """An alert rule. `pending_for`: how long the condition must hold before the alert fires."""

    name: str
    severity: str
    expression: str
    pending_for: str
    summary: str
    description: str

    def rule(self) -> dict[str, Any]:
        anchor = self.name.lower()
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.pending_for,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOKS}#{anchor}",
            },
        }


def recorded(window: str) -> str:
    """Return the name of the recorded SLO miss ratio over a window."""
    return f"moiety:slo_miss:ratio_rate{window}"


def records() -> Iterator[dict[str, Any]]:
    """Yield the recording rules of the SLO miss ratio by class, over each window."""
    for window in WINDOWS:
        missed = f'sum by (service_class) (rate(moiety_slo_requests_total{{attained="false"}}[{window}]))'
        yield {
            "record": recorded(window),
            "expr": f"{missed} / sum by (service_class) (rate(moiety_slo_requests_total[{window}]))",
        }


def burns(pairs: tuple[tuple[float, str, str], ...]) -> str:
    """Return the expression for a burn rate above the threshold, over any of the pairs of windows."""
    parts = []
    for times, long, short in pairs:
        bound = f"{round(times * ERROR_BUDGET, 6):g}"
        enough = f"sum by (service_class) (increase(moiety_slo_requests_total[{long}])) > {MIN_REQUESTS}"
        parts.append(f"({recorded(long)} > {bound} and {recorded(short)} > {bound} and {enough})")
    return " or ".join(parts)


SLOS = (
    Alert(
        "MoietySloBurnFast", PAGE, burns(FAST), "2m",
        "{{ $labels.service_class }}: fast burn of the SLO error budget",
        f"{{{{ $value | humanizePercentage }}}} of requests missed their SLO; the objective is {OBJECTIVE:.0%} "
        "attainment. At this burn rate the 30-day error budget is exhausted within five days.",
    ),
    Alert(
        "MoietySloBurnSlow", TICKET, burns(SLOW), "15m",
        "{{ $labels.service_class }}: slow burn of the SLO error budget",
        f"{{{{ $value | humanizePercentage }}}} of requests missed their SLO; the objective is {OBJECTIVE:.0%} "
        "attainment.",
    ),
    Alert(
        "MoietyErrors", PAGE,
        'sum by (model) (rate(moiety_requests_total{outcome="failed"}[10m])) '
        "/ sum by (model) (rate(moiety_requests_total[10m])) > 0.05 and sum by (model) "
        f"(increase(moiety_requests_total[10m])) > {MIN_REQUESTS}",
        "5m",
        "{{ $labels.model }}: high error rate",
        "{{ $value | humanizePercentage }} of the requests of the last ten minutes failed after admission.",
    ),
)  # fmt: skip
ENGINES = (
    Alert(
        "MoietyNoEngine", PAGE,
        "moiety_store_ready unless on (instance) (moiety_engine_up == 1) "
        "unless on (instance) (moiety_wake_ready == 1)",
        "1m",
        "Gateway {{ $labels.instance }} has no engine",
        "No engine accepts requests from this gateway. The gateway answers all requests with 503.",
    ),
    Alert(
        "MoietyEngineNotWoken", PAGE,
        "sum by (model) (increase(moiety_wake_rejected_requests_total[5m])) > 0", "1m",
        "{{ $labels.model }}: requests gave up waiting for an engine",
        "Engines of the model sleep or are stopped, and none was awake within wake_timeout_s.",
    ),
    Alert(
        "MoietyEngineDown", PAGE,
        "max by (engine) (moiety_engine_up) == 0 unless max by (engine) (moiety_engine_asleep) == 1", "5m",
        "Engine {{ $labels.engine }} is down",
        "The engine has been unreachable or draining for five minutes, and is not in sleep mode.",
    ),
    Alert(
        "MoietyKvFull", TICKET,
        "max by (engine) (moiety_engine_kv_blocks_used / moiety_engine_kv_blocks) > 0.95 "
        "and max by (engine) (moiety_engine_num_waiting) > 0",
        "10m",
        "Engine {{ $labels.engine }}: KV cache is full",
        "{{ $value | humanizePercentage }} of the KV cache blocks are in use, and requests are waiting.",
    ),
    Alert(
        "MoietyRanksExcluded", TICKET,
        "max by (engine) (moiety_engine_excluded_ranks) > 0", "5m",
        "Engine {{ $labels.engine }} runs with excluded ranks",
        "{{ $value }} ranks did not join at the last start; the other ranks hold their parts of the model.",
    ),
)  # fmt: skip
STORE = (
    Alert(
        "MoietyNoGateway", PAGE, "absent(moiety_store_ready)", "5m",
        "No gateway metrics",
        "Prometheus scrapes no gateway: no gateway is running, or service discovery does not find the gateways.",
    ),
    Alert(
        "MoietyMigrationsBehind", PAGE, "moiety_store_ready == 0", "5m",
        "Gateway {{ $labels.instance }} is not ready: database schema or connection",
        "The database does not answer, or lacks a table or column that this gateway needs. The gateway accepts no "
        "traffic.",
    ),
    Alert(
        "MoietyLedgerLag", PAGE, "moiety_ledger_lag_seconds > 120", "3m",
        "Gateway {{ $labels.instance }} cannot store usage",
        "The oldest unstored usage row is {{ $value | humanizeDuration }} old. No usage is lost, but quotas are "
        "enforced late.",
    ),
    Alert(
        "MoietyUsageRefused", TICKET, 'increase(moiety_ledger_rows_total{step="refused"}[1h]) > 0', "0m",
        "Gateway {{ $labels.instance }}: the database rejects usage rows",
        "The rejected rows are kept in the journal directory and are not billed.",
    ),
    Alert(
        "MoietyLeasesExpire", PAGE, "moiety_quota_store_age_seconds > 15", "1m",
        "Gateway {{ $labels.instance }} cannot renew its quota leases",
        "The database has not answered for {{ $value | humanizeDuration }}: requests under a quota get 503.",
    ),
    Alert(
        "MoietyQuarantineGrows", TICKET,
        "max(delta(moiety_quota_quarantined_leases[30m])) > 0 "
        "and max(moiety_quota_quarantine_oldest_seconds) > 600",
        "15m",
        "Quota leases in quarantine increase",
        "Gateways crash while they hold quota leases. {{ $value }} more leases count as spent, because the engines do "
        "not report that no request uses them.",
    ),
    Alert(
        "MoietyRetentionJobFails", TICKET,
        "sum by (retention_job) (increase(moiety_retention_failures_total[6h])) > 2", "0m",
        "Retention job {{ $labels.retention_job }} fails",
        "Expired rows are not deleted.",
    ),
    Alert(
        "MoietyConfigReloadFails", TICKET, "moiety_config_last_reload_successful == 0", "5m",
        "{{ $labels.instance }} cannot reload its configuration file",
        "The file is invalid. The process runs with the previous configuration, and will not start with this file.",
    ),
    Alert(
        "MoietySpansLost", TICKET,
        "sum by (destination, reason) (rate(moiety_spans_dropped_total[10m])) > 0", "15m",
        "Spans to {{ $labels.destination }} are lost",
        "{{ $value }} spans per second are lost: {{ $labels.reason }}. Requests are not affected.",
    ),
)  # fmt: skip
MACHINES = (
    Alert(
        "MoietyDiskFull", PAGE, "moiety_data_dir_free_bytes < 1024 * 1024 * 1024", "1m",
        "Gateway {{ $labels.instance }}: the disk of the data directory is nearly full",
        "{{ $value | humanize1024 }}B are free. On a full disk, usage is kept in memory only, and logs lose output.",
    ),
    Alert(
        "MoietyOpenFiles", PAGE, "process_open_fds / process_max_fds > 0.9 or moiety_open_files_used_up == 1", "1m",
        "{{ $labels.instance }}: nearly all open files that are allowed are in use",
        "At the limit the process refuses connections.",
    ),
    Alert(
        "MoietyProcessHangs", TICKET,
        'sum by (instance, process) (increase(moiety_serve_restarts_total{reason="hang"}[1h])) > 0', "0m",
        "{{ $labels.instance }}: the process {{ $labels.process }} hung",
        "The supervisor killed the process after it had not responded, and started it again.",
    ),
)  # fmt: skip


def document() -> dict[str, Any]:
    """Return the rules in Prometheus' form."""
    alerts = {"moiety-slo": SLOS, "moiety-engines": ENGINES, "moiety-store": STORE, "moiety-machines": MACHINES}
    groups: list[dict[str, Any]] = [{"name": "moiety-slo-records", "interval": "30s", "rules": list(records())}]
    groups += [{"name": name, "rules": [alert.rule() for alert in of]} for name, of in alerts.items()]
    return {"groups": groups}


def main(folder: Path) -> None:
    text = "# Written by helm/write_alerts.py.\n" + yaml.safe_dump(document(), sort_keys=False, width=100_000)
    (folder / "alert_rules.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
