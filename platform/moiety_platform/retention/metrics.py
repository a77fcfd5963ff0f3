"""Prometheus metrics of the deletion of expired data."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class RetentionMetrics:
    """Counts of deleted expired rows, in whichever process deletes them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        rows_help = (
            "Rows deleted by each retention job; `files_without_end` sets an expiry, `usage_days` and "
            "`usage_attributed_sums` sum usage up."
        )
        self._rows = Counter("moiety_retention_rows", rows_help, ("retention_job",), registry=registry)
        failures_help = "Failed runs of each retention job; the log has the error."
        self._failures = Counter("moiety_retention_failures", failures_help, ("retention_job",), registry=registry)

    def observe(self, job_name: str, num_rows: int) -> None:
        self._rows.labels(job_name).inc(num_rows)

    def observe_failure(self, job_name: str) -> None:
        self._failures.labels(job_name).inc()
