"""Command `moiety endpoint-picker`: chooses a gateway for each request of a proxy (Envoy's external processing)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from moiety_platform.cli.errors import CommandError
from moiety_platform.cluster.errors import ClusterError
from moiety_platform.cluster.pod_identity import ACCOUNT, PodIdentity
from moiety_platform.endpoint_picker.certificates import CertificateFiles, ServedCertificate, self_signed_certificate
from moiety_platform.endpoint_picker.errors import BadCertificate, BadEndpoint
from moiety_platform.endpoint_picker.members import EndpointAddress
from moiety_platform.endpoint_picker.picking import LOAD_FACTOR
from moiety_platform.endpoint_picker.process import PickerTerms, PodPool, run_endpoint_picker
from moiety_platform.listening import AddressUnavailable
from moiety_platform.logs import configure_logging

MOST_ENDPOINTS = 16


def endpoint_picker(
    selector: Annotated[
        str | None, typer.Option(help="Labels of the gateways' Pods in this pod's namespace, NAME=VALUE,NAME=VALUE.")
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="URL of a gateway outside Kubernetes, http://IP:PORT. May be given several times."),
    ] = None,
    target_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the Pods to which requests are sent.")
    ] = 8000,
    operations_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port of the gateways' operations listener, whose /readyz reports the number of open requests. If not "
            "given, the port of the requests.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for proxies (gRPC).")] = 9002,
    health_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for gRPC health checks, without TLS.")
    ] = 9003,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for Prometheus metrics (HTTP, /metrics), without TLS.")
    ] = 9004,
    tls: Annotated[
        bool, typer.Option("--tls/--no-tls", help="Serve proxies with TLS; the default certificate signs itself.")
    ] = True,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="File with the certificate chain in PEM.", dir_okay=False)
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="File with its private key in PEM.", dir_okay=False)] = None,
    probe_interval_s: Annotated[
        float, typer.Option(min=0.05, help="Interval between the probes of a gateway, in seconds.")
    ] = 0.5,
    num_endpoints: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_ENDPOINTS,
            help="Number of gateways named for a request. Those after the first are for retries of the proxy, which "
            "must support a list.",
        ),
    ] = 1,
    load_factor: Annotated[
        float,
        typer.Option(min=1.0, help="Most load of a gateway relative to the mean before its keys go to another one."),
    ] = LOAD_FACTOR,
    account: Annotated[
        Path, typer.Option(help="Folder with the token, namespace and certificate of the pod.", hidden=True)
    ] = ACCOUNT,
) -> None:
    """Choose a gateway for each request of a proxy: the endpoint picker of the Gateway API Inference Extension.

    The gateways are Pods with the labels of --selector, or those of --endpoint. A request goes to a ready gateway: the
    same API key to the same one, unless its load exceeds the mean too much. Runs until it is stopped.
    """
    configure_logging("info", "auto")
    try:
        if not math.isfinite(load_factor):
            raise typer.BadParameter("give a number from 1 on", param_hint="--load-factor")
        members = members_of(selector, endpoint or (), target_port, operations_port, account)
        certificate = certificate_of(tls_certificate, tls_key) if tls else None
        run_endpoint_picker(
            PickerTerms(
                members,
                host,
                port,
                health_port,
                metrics_port,
                certificate,
                probe_interval_s,
                num_endpoints,
                load_factor,
            )
        )
    except (BadEndpoint, BadCertificate) as exc:
        raise typer.BadParameter(str(exc)) from exc
    except (AddressUnavailable, ClusterError) as exc:
        raise CommandError(str(exc)) from exc


def members_of(
    selector: str | None, urls: Sequence[str], port: int, operations_port: int | None, account: Path
) -> Sequence[EndpointAddress] | PodPool:
    """Return the members of the pool. Raises BadParameter, BadEndpoint or NotInACluster."""
    if (selector is None) == (not urls):
        raise typer.BadParameter("give either --selector, for Pods, or --endpoint for each gateway outside Kubernetes")
    if selector is None:
        return [EndpointAddress.of_url(url, operations_port) for url in urls]
    return PodPool(PodIdentity.of(os.environ, account), labels_of(selector), port, operations_port or port)


def labels_of(selector: str) -> dict[str, str]:
    """Return the labels of `NAME=VALUE,NAME=VALUE`. Raises BadParameter."""
    pairs = [one.partition("=") for one in selector.split(",")]
    if not all(name and separator for name, separator, _ in pairs):
        raise typer.BadParameter(f"{selector!r} is no list of labels: give NAME=VALUE,NAME=VALUE")
    return {name.strip(): value.strip() for name, _, value in pairs}


def certificate_of(certificate: Path | None, key: Path | None) -> ServedCertificate:
    """Return the certificate of the files, or a new one. Raises BadParameter or BadCertificate."""
    if (certificate is None) != (key is None):
        raise typer.BadParameter("give --tls-certificate and --tls-key together, or none for one that signs itself")
    if certificate is None or key is None:
        return ServedCertificate(self_signed_certificate())
    return CertificateFiles(certificate, key)
