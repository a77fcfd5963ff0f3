"""Who may bring KV: engines that have the same secret key, and nobody else. Without a key the link is open, as that of
the gateways is.

The secret is one pair of CURVE keys, which all engines have: the receiver is sure of the sender by the sender's public
key, which ZeroMQ asks a handler about (ZAP, https://rfc.zeromq.org/spec/27)."""

from __future__ import annotations

import threading

import zmq
from zmq.utils import z85

ZAP_ADDRESS = "inproc://zeromq.zap.01"
_NUM_FRAMES = 7  # of a request with CURVE: the last is the client's public key


class PeerAuthenticator:
    """Answers for all sockets of a context. A thread of its own, until the context ends."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], public_key: bytes) -> None:
        self._wanted = z85.decode(public_key)
        self._socket = context.socket(zmq.REP)
        self._socket.bind(ZAP_ADDRESS)
        threading.Thread(target=self._answer, name="kv-guard", daemon=True).start()

    def _answer(self) -> None:
        try:
            while True:
                frames = self._socket.recv_multipart()
                is_ours = len(frames) == _NUM_FRAMES and frames[6] == self._wanted
                status = (b"200", b"OK") if is_ours else (b"400", b"another key than the engines'")
                self._socket.send_multipart((frames[0], frames[1], *status, b"", b""))
        except zmq.ContextTerminated:
            self._socket.close(linger=0)


def guard_receiver(socket: zmq.Socket[bytes], secret_key: bytes) -> None:
    """To be set before it is bound; its context has a PeerAuthenticator."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, "kv")


def present_sender(socket: zmq.Socket[bytes], secret_key: bytes) -> None:
    """To be set before it is connected."""
    public_key = zmq.curve_public(secret_key)
    socket.setsockopt(zmq.CURVE_SERVERKEY, public_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
