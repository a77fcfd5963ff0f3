"""Connection to the API of Kubernetes as the pod's service account, by lightkube."""

from __future__ import annotations

import httpx2
from lightkube import Client, KubeConfig
from lightkube.config.models import Cluster, User

from moiety_platform.cluster.errors import NotInACluster
from moiety_platform.cluster.pod_identity import PodIdentity


def kubernetes_client(identity: PodIdentity, timeout_s: float) -> Client:
    """Return a client that connects at its first use. Raises NotInACluster where the certificate cannot be read."""
    config = KubeConfig.from_one(
        cluster=Cluster(server=identity.url, certificate_auth=str(identity.ca)),
        user=User(token_file=str(identity.token_file)),
        namespace=identity.namespace,
    )
    try:
        return Client(config, timeout=httpx2.Timeout(timeout_s), trust_env=False)
    except OSError as exc:
        raise NotInACluster(f"{identity.ca} cannot be read ({exc}): give the pod a service account") from exc
