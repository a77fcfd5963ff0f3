"""Generator of Prometheus' alert rules in helm/moiety/alerts/rules.yaml: `python helm/alerts.py [FOLDER]`.

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
ALLOWANCE = round(1 - OBJECTIVE, 6)
FEW = 20  # requests in the long window, below which one miss has no significance
PAGE, TICKET = "page", "ticket"
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
# (burn rate, long window, short window): 14.4 uses 2 % of a month's budget in an hour, 6 uses 5 % in six hours
FAST = ((14.4, "1h", "5m"), (6.0, "6h", "30m"))
SLOW = ((3.0, "1d", "2h"), (1.0, "3d", "6h"))


@dataclass(frozen=True)
class Alert:
    """An alert rule. `lasting`: how long the condition must hold before the alert fires."""

    name: str
    severity: str
    expression: str
    lasting: str
    summary: str
    description: str

    def rule(self) -> dict[str, Any]:
        anchor = self.name.lower()
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOKS}#{anchor}",
            },
        }


def recorded(window: str) -> str:
    return f"moiety:sla_missed:ratio_rate{window}"


def records() -> Iterator[dict[str, Any]]:
    """Yield the share of missed SLOs by class, over each window."""
    for window in WINDOWS:
        missed = f'sum by (service_class) (rate(moiety_sla_total{{attained="false"}}[{window}]))'
        yield {
            "record": recorded(window),
            "expr": f"{missed} / sum by (service_class) (rate(moiety_sla_total[{window}]))",
        }


def burns(pairs: tuple[tuple[float, str, str], ...]) -> str:
    """Return the expression for a burn rate above the threshold, over any of the pairs of windows."""
    parts = []
    for times, long, short in pairs:
        bound = f"{round(times * ALLOWANCE, 6):g}"
        enough = f"sum by (service_class) (increase(moiety_sla_total[{long}])) > {FEW}"
        parts.append(f"({recorded(long)} > {bound} and {recorded(short)} > {bound} and {enough})")
    return " or ".join(parts)


PROMISES = (
    Alert(
        "MoietySlaBurnFast", PAGE, burns(FAST), "2m",
        "{{ $labels.service_class }}: promises are missed fast",
        f"{{{{ $value | humanizePercentage }}}} of them; the objective is {OBJECTIVE:.0%} kept. At this pace a month's "
        "allowance is gone in five days at the latest.",
    ),
    Alert(
        "MoietySlaBurnSlow", TICKET, burns(SLOW), "15m",
        "{{ $labels.service_class }}: promises are missed steadily",
        f"{{{{ $value | humanizePercentage }}}} of them; the objective is {OBJECTIVE:.0%} kept.",
    ),
    Alert(
        "MoietyErrors", PAGE,
        'sum by (model) (rate(moiety_requests_total{outcome="failed"}[10m])) '
        "/ sum by (model) (rate(moiety_requests_total[10m])) > 0.05 "
        f"and sum by (model) (increase(moiety_requests_total[10m])) > {FEW}",
        "5m",
        "{{ $labels.model }}: requests fail",
        "{{ $value | humanizePercentage }} of the last ten minutes' requests failed after they had been accepted.",
    ),
)  # fmt: skip
ENGINES = (
    Alert(
        "MoietyNoEngine", PAGE,
        "moiety_store_ready unless on (instance) (moiety_engine_up == 1)", "1m",
        "{{ $labels.instance }} has no engine",
        "No engine takes requests of this gateway; all are answered with 503.",
    ),
    Alert(
        "MoietyEngineDown", PAGE,
        "max by (engine) (moiety_engine_up) == 0 unless max by (engine) (moiety_engine_asleep) == 1", "5m",
        "Engine {{ $labels.engine }} takes no requests",
        "It is lost, or has been draining for five minutes; it was not put to sleep.",
    ),
    Alert(
        "MoietyKvFull", TICKET,
        "max by (engine) (moiety_engine_kv_blocks_used / moiety_engine_kv_blocks) > 0.95 "
        "and max by (engine) (moiety_engine_num_waiting) > 0",
        "10m",
        "Engine {{ $labels.engine }} is out of KV memory",
        "{{ $value | humanizePercentage }} of its blocks are held, and requests wait.",
    ),
    Alert(
        "MoietyRanksMasked", TICKET,
        "max by (engine) (moiety_engine_masked_ranks) > 0", "5m",
        "Engine {{ $labels.engine }} serves without some of its ranks",
        "{{ $value }} did not come when it started; the others have their parts of the model.",
    ),
)  # fmt: skip
STORE = (
    Alert(
        "MoietyNoGateway", PAGE, "absent(moiety_store_ready)", "5m",
        "No gateway tells metrics",
        "Prometheus reads no gateway: none runs, or it does not find them.",
    ),
    Alert(
        "MoietyMigrationsBehind", PAGE, "moiety_store_ready == 0", "5m",
        "{{ $labels.instance }} waits for its database",
        "A table or column that this gateway needs is not there, or the database does not answer. It takes no traffic.",
    ),
    Alert(
        "MoietyLedgerLag", PAGE, "moiety_ledger_lag_seconds > 120", "3m",
        "{{ $labels.instance }} cannot store what was used",
        "The oldest usage row has waited for {{ $value | humanizeDuration }}. Nothing is lost, but limits lag.",
    ),
    Alert(
        "MoietyUsageRefused", TICKET, 'increase(moiety_ledger_rows_total{step="refused"}[1h]) > 0', "0m",
        "{{ $labels.instance }}: the database refuses usage rows",
        "They lie in the journal's folder and are not billed.",
    ),
    Alert(
        "MoietyLeasesExpire", PAGE, "moiety_quota_store_age_seconds > 15", "1m",
        "{{ $labels.instance }} cannot renew its leases",
        "The store has not answered for {{ $value | humanizeDuration }}: requests under a limit get 503.",
    ),
    Alert(
        "MoietyQuarantineGrows", TICKET,
        "max(delta(moiety_quota_quarantined_leases[30m])) > 0 "
        "and max(moiety_quota_quarantine_oldest_seconds) > 600",
        "15m",
        "Leases in quarantine become more",
        "Gateways die with leases, and engines do not prove them unspent: {{ $value }} more count as spent.",
    ),
    Alert(
        "MoietyUpkeepFails", TICKET, "sum by (chore) (increase(moiety_retention_failures_total[6h])) > 2", "0m",
        "Retention of {{ $labels.chore }} fails",
        "What is past its time is not deleted.",
    ),
    Alert(
        "MoietyConfigNotTaken", TICKET, "moiety_config_last_reload_successful == 0", "5m",
        "{{ $labels.instance }} has not taken its configuration file",
        "The file is wrong; it goes by what the file said before, and will not start with what it says now.",
    ),
    Alert(
        "MoietySpansLost", TICKET,
        "sum by (destination, reason) (rate(moiety_spans_dropped_total[10m])) > 0", "15m",
        "Traces do not reach {{ $labels.destination }}",
        "{{ $value }} spans a second are lost: {{ $labels.reason }}. No request is slower for it.",
    ),
)  # fmt: skip


def document() -> dict[str, Any]:
    """Return the rules in Prometheus' form."""
    alerts = {"moiety-promises": PROMISES, "moiety-engines": ENGINES, "moiety-store": STORE}
    groups: list[dict[str, Any]] = [{"name": "moiety-sla", "interval": "30s", "rules": list(records())}]
    groups += [{"name": name, "rules": [alert.rule() for alert in of]} for name, of in alerts.items()]
    return {"groups": groups}


def main(folder: Path) -> None:
    text = "# Written by helm/alerts.py.\n" + yaml.safe_dump(document(), sort_keys=False, width=100_000)
    (folder / "rules.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
