"""Connector of one engine for KV transfer, according to its role."""

from __future__ import annotations

from pathlib import Path

import msgspec

from moiety_engine.config import TransferConfig
from moiety_engine.errors import InvalidConfig
from moiety_engine.kv_transfer.kv_receiver import KvReceiver
from moiety_engine.kv_transfer.kv_sender import KvSender
from moiety_engine.kv_transfer.receiver_thread import ReceiverThread
from moiety_engine.kv_transfer.sender_thread import SenderThread
from moiety_engine.kv_transfer.staging_buffer import StagingBuffer
from moiety_engine.kv_transfer.transports import own_host
from moiety_engine.memory import available_bytes
from moiety_engine.messages import CoreFailure, CoreFinish, CoreOutput, CoreSubmit
from moiety_engine.model.batch import KvCache
from moiety_wire.messages import FinishReason
from moiety_wire.roles import EngineRole

_SHARE_OF_HOST = 0.1


class KvConnector:
    """KV transfer of one engine. Used by the step loop's thread.

    `kv_sender` is set on an engine that prefills for others, `arrivals` on one that receives KV.
    """

    def __init__(
        self,
        kv_sender: KvSender | None = None,
        arrivals: KvReceiver | None = None,
        zone: StagingBuffer | None = None,
        receiver: ReceiverThread | None = None,
    ) -> None:
        self.kv_sender, self.arrivals = kv_sender, arrivals
        self._zone, self._receiver = zone, receiver
        self.prefill_done_requests_total = 0

    @property
    def address(self) -> str:
        """Address at which KV is received; "" if none is received."""
        return "" if self._receiver is None else self._receiver.address

    @property
    def host(self) -> str:
        return "" if self._receiver is None else own_host()

    @property
    def secret(self) -> str:
        """Secret with which gateways authorise transfers; "" if no KV is received."""
        return "" if self._receiver is None else self._receiver.secret

    @property
    def num_waiting(self) -> int:
        """Requests whose KV has not arrived yet."""
        return 0 if self.arrivals is None else self.arrivals.num_waiting

    def serve(self, kv: KvCache | None) -> None:
        """Set the cache for received KV; None while the engine sleeps."""
        if self._zone is not None:
            self._zone.serve(kv)

    def depart(self, submit: CoreSubmit) -> CoreSubmit:
        """Register a request for disaggregated prefill, and return it limited to its next token."""
        num_tokens = len(submit.resumed_ids or ()) + 1
        if self.kv_sender is None or submit.embed or submit.max_tokens <= num_tokens:
            return msgspec.structs.replace(submit, hand_over=None)
        self.kv_sender.add_request(submit)
        return msgspec.structs.replace(submit, max_tokens=num_tokens)

    def num_transferred_tokens(self, key: int) -> int:
        """Return the number of tokens of a request whose KV has arrived."""
        arrival = None if self.arrivals is None else self.arrivals.arrival_of(key)
        return 0 if arrival is None else arrival.num_tokens

    def with_transfer_results(self, outputs: list[CoreOutput], failures: list[CoreFailure]) -> list[CoreOutput]:
        """Return the outputs for the engine server, with the transfer result of the requests that end.

        The result is the transfer times of received KV, or the reason why KV was not sent.
        """
        if self.kv_sender is None and self.arrivals is None:
            return outputs
        for failure in failures:
            self._ended(failure.key, prefill_done=False)
        return [output if output.finish is None else self._end(output, output.finish) for output in outputs]

    def close(self) -> None:
        """End the threads."""
        if self.kv_sender is not None:
            self.kv_sender.close()
        if self._receiver is not None:
            self._receiver.close()

    def _end(self, output: CoreOutput, finish: CoreFinish) -> CoreOutput:
        arrival = None if self.arrivals is None else self.arrivals.arrival_of(output.key)
        prefill_done = finish.reason is FinishReason.PREFILL_DONE
        self.prefill_done_requests_total += prefill_done
        problem = self._ended(output.key, prefill_done=prefill_done)
        if arrival is None and not problem:
            return output
        finish = msgspec.structs.replace(finish, arrival=arrival, detail=problem or finish.detail)
        return msgspec.structs.replace(output, finish=finish)

    def _ended(self, key: int, *, prefill_done: bool) -> str:
        if self.arrivals is not None:
            self.arrivals.ended(key)
        return "" if self.kv_sender is None else self.kv_sender.ended(key, prefill_done=prefill_done)


NO_CONNECTOR = KvConnector()


def connector_of(config: TransferConfig) -> KvConnector:
    """Return the connector of the configuration. Raises InvalidConfig if the address or the key is unusable."""
    if config.role is EngineRole.BOTH and not config.listen:
        return NO_CONNECTOR
    key = _read_key(config.key_file)
    max_bytes = config.buffer_bytes or max(1, int(available_bytes() * _SHARE_OF_HOST))
    kv_sender = None
    if config.role is EngineRole.PREFILL:
        kv_sender = KvSender(SenderThread(config.transport, max_bytes, key))
    if not config.listen:
        return KvConnector(kv_sender)
    zone = StagingBuffer(max_bytes)
    return KvConnector(kv_sender, KvReceiver(zone), zone, ReceiverThread(config.listen, zone, key))


def _read_key(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes().strip()
    except OSError as exc:
        raise InvalidConfig(f"the key file {path} cannot be read: {exc.strerror}") from exc
