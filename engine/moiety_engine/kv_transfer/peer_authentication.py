"""Authentication of KV senders: engines with the same secret key. Without a key, any peer may connect.

The secret is one pair of CURVE keys, which all engines share. The receiver checks the sender's public key in a ZAP
handler, which ZeroMQ calls (https://rfc.zeromq.org/spec/27).
"""

from __future__ import annotations

import threading

import zmq
from zmq.utils import z85

ZAP_ADDRESS = "inproc://zeromq.zap.01"
_NUM_FRAMES = 7  # frames of a ZAP request with CURVE; the last is the client's public key


class PeerAuthenticator:
    """ZAP handler for all sockets of a context. Runs in its own thread until the context ends."""

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
    """Set the receiver's CURVE options. Call it before `bind`; the socket's context needs a PeerAuthenticator."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, "kv")


def present_sender(socket: zmq.Socket[bytes], secret_key: bytes) -> None:
    """Set the sender's CURVE options. Call it before `connect`."""
    public_key = zmq.curve_public(secret_key)
    socket.setsockopt(zmq.CURVE_SERVERKEY, public_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
