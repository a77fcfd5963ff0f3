"""The waker of sleeping engines of one gateway process."""

from __future__ import annotations

import os
from collections.abc import Callable

from moiety_platform.cluster.errors import NotInACluster
from moiety_platform.cluster.pod_identity import PodIdentity
from moiety_platform.live_settings import CannotApplySetting
from moiety_platform.wake_on_request.engine_pools import PoolScaler

OpenScaler = Callable[[], PoolScaler]


def open_scaler() -> PoolScaler:
    """Return the scaler of StatefulSets of this pod's namespace. Raises CannotApplySetting outside a cluster."""
    # slow to import, and only gateways that scale StatefulSets need it
    from moiety_platform.cluster.pool_scaler import StatefulSetScaler  # noqa: PLC0415

    try:
        identity = PodIdentity.of(os.environ)
        return StatefulSetScaler(identity.url, identity.namespace, identity.token_file, identity.ca)
    except (NotInACluster, OSError) as exc:
        raise CannotApplySetting(
            f"scaled_models names a StatefulSet, and the Kubernetes API cannot be used: {exc}; outside a cluster leave "
            "=STATEFULSET out"
        ) from exc
