"""Members of the pool: the running Pods of this namespace with the pool's labels, read by lightkube.

One thread reads the list after each change and at an interval; another one watches for changes. A connection of the
watch that is dead without a sign therefore delays a change by the interval, and no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from lightkube import ApiError
from lightkube.resources.core_v1 import Pod

from moiety_platform.cluster.kubernetes_client import kubernetes_client
from moiety_platform.cluster.pod_identity import PodIdentity

TIMEOUT_S = 10.0
WATCH_S = 240  # after which the API ends a watch, and the next one begins
RESYNC_S = 30.0
SETTLE_S = 0.05  # several Pods often change at once
RETRY_S = 1.0  # after a failure; doubled after each further one
LONGEST_RETRY_S = 30.0
GONE = 410  # status of a watch that begins too far in the past
RUNNING = "Running"

log = structlog.get_logger(__name__)


class PodWatch:
    """Owner of the threads. While the API cannot be reached, the last members stay."""

    def __init__(
        self,
        identity: PodIdentity,
        labels: Mapping[str, str],
        on_change: Callable[[frozenset[str]], None],
        resync_s: float = RESYNC_S,
    ) -> None:
        """Call `on_change` in a thread with the IPs of all members, each time when they have been read.

        Raises NotInACluster where the certificate cannot be read.
        """
        self._identity, self._on_change = identity, on_change
        self._labels: dict[str, Any] = dict(labels)
        self._resync_s = resync_s
        self._client = kubernetes_client(identity, TIMEOUT_S)
        self._is_closed, self._changed = threading.Event(), threading.Event()

    def start(self) -> None:
        """Start to read. Returns at once."""
        for name, work in (("read-pods", self._read_forever), ("watch-pods", self._watch_forever)):
            threading.Thread(target=work, name=name, daemon=True).start()

    def close(self) -> None:
        """Let the threads end with their requests."""
        self._is_closed.set()
        self._changed.set()

    def _read_forever(self) -> None:
        pause_s = RETRY_S
        while not self._is_closed.is_set():
            self._changed.clear()
            try:
                ips = [_member_ip(pod) for pod in self._client.list(Pod, labels=self._labels)]
                self._on_change(frozenset(ip for ip in ips if ip))
            except Exception as exc:  # of any kind: without its thread, changes would be missed for ever
                _warn("pods_not_read", exc, pause_s)
                self._is_closed.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)
            else:
                pause_s = RETRY_S
                self._changed.wait(self._resync_s)
                self._is_closed.wait(SETTLE_S)
        self._client.close()

    def _watch_forever(self) -> None:
        pause_s = RETRY_S
        while not self._is_closed.is_set():
            client = kubernetes_client(self._identity, WATCH_S + TIMEOUT_S)
            try:
                for _ in client.watch(Pod, labels=self._labels, server_timeout=WATCH_S):
                    self._changed.set()
                    pause_s = RETRY_S
                    if self._is_closed.is_set():
                        return
            except Exception as exc:  # as above
                if not (isinstance(exc, ApiError) and exc.status.code == GONE):
                    _warn("pod_watch_failed", exc, pause_s)
                self._is_closed.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)
            finally:
                client.close()


def _member_ip(pod: Pod) -> str | None:
    """Return the IP of a Pod that can get requests; None if it does not run, or will be deleted and drains."""
    metadata, status = pod.metadata, pod.status
    if metadata is None or metadata.deletionTimestamp is not None or status is None or status.phase != RUNNING:
        return None
    return status.podIP


def _warn(event: str, exc: Exception, pause_s: float) -> None:
    advice = f"none needed: it is tried again after {pause_s:g} s"
    if isinstance(exc, ApiError):
        advice = "let the service account list and watch the Pods of its namespace, as the chart's role does"
    log.warning(event, reason=str(exc) or type(exc).__name__, advice=advice)
