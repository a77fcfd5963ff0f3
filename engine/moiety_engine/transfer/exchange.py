"""All that one engine has of the exchange of KV with others, by its role."""

from __future__ import annotations

from pathlib import Path

import msgspec

from moiety_engine.config import TransferConfig
from moiety_engine.errors import InvalidConfig
from moiety_engine.memory import available_bytes
from moiety_engine.messages import CoreFailure, CoreFinish, CoreOutput, CoreSubmit
from moiety_engine.model.batch import KvCache
from moiety_engine.transfer.arrivals import Arrivals
from moiety_engine.transfer.departures import Departures
from moiety_engine.transfer.landing import LandingZone
from moiety_engine.transfer.receiver import Receiver
from moiety_engine.transfer.sender import Sender
from moiety_engine.transfer.ways import own_host
from moiety_wire.messages import FinishReason
from moiety_wire.roles import EngineRole

_SHARE_OF_HOST = 0.1


class Exchange:
    """`departures` where prompts are computed for others, `arrivals` where others' are gone on with. Used by the step
    loop's thread."""

    def __init__(
        self,
        departures: Departures | None = None,
        arrivals: Arrivals | None = None,
        zone: LandingZone | None = None,
        receiver: Receiver | None = None,
    ) -> None:
        self.departures, self.arrivals = departures, arrivals
        self._zone, self._receiver = zone, receiver
        self.handed_over_requests_total = 0

    @property
    def address(self) -> str:
        """Where KV comes in; "" where none does."""
        return "" if self._receiver is None else self._receiver.address

    @property
    def host(self) -> str:
        return "" if self._receiver is None else own_host()

    @property
    def secret(self) -> str:
        """By which gateways allow transfers; "" where no KV comes in."""
        return "" if self._receiver is None else self._receiver.secret

    @property
    def num_waiting(self) -> int:
        """Requests whose KV has not come yet."""
        return 0 if self.arrivals is None else self.arrivals.num_waiting

    def serve(self, kv: KvCache | None) -> None:
        """What comes is for that cache, or for none while the engine sleeps."""
        if self._zone is not None:
            self._zone.serve(kv)

    def depart(self, submit: CoreSubmit) -> CoreSubmit:
        """A request that is to be handed over, as it is to be served here: up to its next token."""
        num_tokens = len(submit.resumed_ids or ()) + 1
        if self.departures is None or submit.embed or submit.max_tokens <= num_tokens:
            return msgspec.structs.replace(submit, hand_over=None)
        self.departures.enter(submit)
        return msgspec.structs.replace(submit, max_tokens=num_tokens)

    def num_landing(self, key: int) -> int:
        """Of so many tokens of a request KV has come."""
        arrival = None if self.arrivals is None else self.arrivals.arrival_of(key)
        return 0 if arrival is None else arrival.num_tokens

    def told(self, outputs: list[CoreOutput], failures: list[CoreFailure]) -> list[CoreOutput]:
        """What the front is told: of those that end, how their KV came, or why it did not go."""
        if self.departures is None and self.arrivals is None:
            return outputs
        for failure in failures:
            self._ended(failure.key, handed_over=False)
        return [output if output.finish is None else self._end(output, output.finish) for output in outputs]

    def close(self) -> None:
        """The threads end."""
        if self.departures is not None:
            self.departures.close()
        if self._receiver is not None:
            self._receiver.close()

    def _end(self, output: CoreOutput, finish: CoreFinish) -> CoreOutput:
        arrival = None if self.arrivals is None else self.arrivals.arrival_of(output.key)
        handed_over = finish.reason is FinishReason.HANDED_OVER
        self.handed_over_requests_total += handed_over
        problem = self._ended(output.key, handed_over=handed_over)
        if arrival is None and not problem:
            return output
        finish = msgspec.structs.replace(finish, arrival=arrival, detail=problem or finish.detail)
        return msgspec.structs.replace(output, finish=finish)

    def _ended(self, key: int, *, handed_over: bool) -> str:
        if self.arrivals is not None:
            self.arrivals.ended(key)
        return "" if self.departures is None else self.departures.ended(key, handed_over=handed_over)


NO_EXCHANGE = Exchange()


def exchange_of(config: TransferConfig) -> Exchange:
    """Raises InvalidConfig where the address or the key cannot be had."""
    if config.role is EngineRole.BOTH and not config.listen:
        return NO_EXCHANGE
    key = _read_key(config.key_file)
    max_bytes = config.landing_bytes or max(1, int(available_bytes() * _SHARE_OF_HOST))
    departures = None
    if config.role is EngineRole.PREFILL:
        departures = Departures(Sender(config.way, max_bytes, key))
    if not config.listen:
        return Exchange(departures)
    zone = LandingZone(max_bytes)
    return Exchange(departures, Arrivals(zone), zone, Receiver(config.listen, zone, key))


def _read_key(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes().strip()
    except OSError as exc:
        raise InvalidConfig(f"the key {path} cannot be read: {exc.strerror}") from exc
