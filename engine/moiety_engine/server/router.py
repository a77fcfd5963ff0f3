"""Socket that gateways connect to."""

from __future__ import annotations

import zmq

from moiety_engine.server.gateway_keys import ZAP_DOMAIN, GatewayAuthenticator
from moiety_engine.server.settings import ServerSettings

MAX_MESSAGE_BYTES = 64 * 2**20


def make_router(context: zmq.Context[zmq.Socket[bytes]], settings: ServerSettings) -> zmq.Socket[bytes]:
    """Return the ROUTER socket, not bound yet. Raises zmq.ZMQError for an invalid CURVE key."""
    has_keys = settings.curve_secret_key is not None
    if has_keys:
        GatewayAuthenticator(context, settings.gateway_keys_file)
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A gateway reconnects under its identity. With keys a new connection could belong to another
    # gateway, so it does not get the identity of a connected one.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0 if has_keys else 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, settings.send_high_water)
    socket.setsockopt(zmq.LINGER, 0)
    if settings.curve_secret_key is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, settings.curve_secret_key)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    return socket
