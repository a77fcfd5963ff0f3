from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import zmq

from moiety_engine.errors import InvalidConfig
from moiety_engine.scripted.script import Script
from moiety_engine.server.gateway_keys import read_gateway_keys
from moiety_engine.server.permissions import LOGGED_PER_INTERVAL, GatewayPermissions
from moiety_engine.server.sessions import GatewaySession, Sessions
from moiety_wire.engine_load import SleepState
from moiety_wire.experts import ExpertLoadQuery
from moiety_wire.messages import (
    Abort,
    Extend,
    Failed,
    FailureCode,
    Finished,
    Forget,
    Heartbeat,
    Hello,
    SleepCommand,
    ToEngine,
    ToGateway,
    UnacknowledgedUsage,
    UsageAcknowledgement,
)
from moiety_wire.permissions import ALLOWED_SENDERS, GATEWAY_ROLES, SenderRole, may_send

Keys = tuple[bytes, bytes]
ENGINE = zmq.curve_keypair()


def options(keys: Keys, identity: bytes = b"") -> dict[str, int | bytes]:
    """Return the options of a gateway's socket."""
    found: dict[str, int | bytes] = {
        "CURVE_SERVERKEY": ENGINE[0],
        "CURVE_PUBLICKEY": keys[0],
        "CURVE_SECRETKEY": keys[1],
    }
    return found | ({"IDENTITY": identity} if identity else {})


def write(file: Path, *lines: bytes) -> Path:
    """Replace the file in one step, under another inode, as an orchestrator does."""
    fresh = file.with_suffix(".new")
    fresh.write_bytes(b"\n".join(lines) + b"\n")
    return fresh.replace(file)


async def ask_for_billing(running: Any, keys: Keys, submit: Callable[..., Any]) -> Any:
    """Return the first gateway, whose request `paid` has ended with usage that it has not acknowledged."""
    gateway = running.connect(**options(keys))
    await gateway.send(Hello("gateway", replica_id="first"))
    await gateway.ask(submit("paid", billing_context=b"bill"))
    return gateway


def test_every_message_of_the_wire_says_who_may_send_it() -> None:
    assert set(ALLOWED_SENDERS) == {*get_args(ToEngine), *get_args(ToGateway)}
    for kind in get_args(ToEngine):
        assert ALLOWED_SENDERS[kind] and ALLOWED_SENDERS[kind] <= GATEWAY_ROLES
    for kind in get_args(ToGateway):
        assert ALLOWED_SENDERS[kind] == {SenderRole.ENGINE}


def test_a_message_that_the_table_does_not_know_may_be_sent_by_nobody() -> None:
    assert not may_send(frozenset(SenderRole), object())
    assert may_send(frozenset({SenderRole.ADMINISTRATION}), SleepCommand(asleep=True))
    assert not may_send(frozenset({SenderRole.INFERENCE}), SleepCommand(asleep=True))


def test_a_line_names_the_roles_of_its_key_and_a_key_alone_has_both(tmp_path: Path) -> None:
    first, second = zmq.curve_keypair()[0], zmq.curve_keypair()[0]
    file = write(tmp_path / "gateways", b"# ours", first, second + b" inference")
    assert [one.roles for one in read_gateway_keys(file).values()] == [GATEWAY_ROLES, {SenderRole.INFERENCE}]
    write(file, first + b" inference root")
    with pytest.raises(InvalidConfig, match="line 1: unknown role 'root'"):
        read_gateway_keys(file)


async def test_a_gateway_for_inference_alone_can_neither_have_an_engine_sleep_nor_a_tenant_forgotten(
    bench: Any, submit: Any, tmp_path: Path
) -> None:
    serving, ruling = zmq.curve_keypair(), zmq.curve_keypair()
    file = write(tmp_path / "gateways", serving[0] + b" inference", ruling[0] + b" administration")
    async with bench(curve_secret_key=ENGINE[1], gateway_keys_file=file) as running:
        gateway, ruler = running.connect(**options(serving)), running.connect(**options(ruling))
        await gateway.greet()
        await gateway.send(SleepCommand(asleep=True), Forget(["tenant"]), ExpertLoadQuery(1, 0))
        load = await gateway.until_load(lambda load: load.sleep_problem)
        assert (load.sleep, load.sleep_problem) == (
            SleepState.AWAKE,
            "this gateway's key does not have the role administration",
        )
        assert (await gateway.ask(submit("goes on"))).text == "hello"
        assert running.front.stats().num_refused == 3
        await ruler.greet()
        assert not ruler.loads[-1].sleep_problem, "others are not told of it"
        refused = (await ruler.ask(submit("not its business"))).end
        assert isinstance(refused, Failed) and refused.code is FailureCode.ENGINE_FAILED
        await ruler.send(SleepCommand(asleep=True))
        await ruler.until_load(lambda load: load.sleep is SleepState.ASLEEP)


async def test_an_identity_that_is_connected_cannot_be_taken_with_another_key(
    bench: Any, submit: Any, tmp_path: Path
) -> None:
    first, second = zmq.curve_keypair(), zmq.curve_keypair()
    file = write(tmp_path / "gateways", first[0], second[0])
    async with bench(Script(step_delay_s=0.01), curve_secret_key=ENGINE[1], gateway_keys_file=file) as running:
        gateway = running.connect(**options(first, b"known"))
        await gateway.greet()
        await gateway.send(submit("long", "x" * 40))
        await gateway.until(lambda: "long" in gateway.answers and gateway.answers["long"].pieces)
        thief = running.connect(**options(second, b"known"))
        for _ in range(3):
            await thief.send(Hello("thief"))
        answer = await gateway.finish("long")
        assert (answer.text, type(answer.end)) == ("x" * 40, Finished)
        assert not thief.answers


def test_an_identity_that_another_key_takes_up_again_gets_a_session_of_its_own() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        sessions = Sessions(router, max_outbox_messages=1)
        first = sessions.session_of_sender(b"known", 0.0, "key of the first")
        first.open_keys["r"] = 1
        assert sessions.session_of_sender(b"known", 1.0, "key of the first") is first
        second = sessions.session_of_sender(b"known", 2.0, "key of the second")
        assert second is not first and not second.open_keys
        assert sessions.take_gone() == [first] and sessions.all() == [second]


async def test_a_gateway_neither_ends_nor_pauses_a_request_of_another(bench: Any, submit: Any, tmp_path: Path) -> None:
    first, second = zmq.curve_keypair(), zmq.curve_keypair()
    file = write(tmp_path / "gateways", first[0], second[0])
    async with bench(Script(step_delay_s=0.01), curve_secret_key=ENGINE[1], gateway_keys_file=file) as running:
        gateway, other = running.connect(**options(first)), running.connect(**options(second))
        await gateway.send(submit("long", "x" * 40))
        await gateway.until(lambda: "long" in gateway.answers and gateway.answers["long"].pieces)
        await other.send(Abort("long", 0), Extend("long", 1, 0, last=True))
        assert (await other.ask(submit("own"))).text == "hello", "what it had sent before was taken"
        assert (await gateway.finish("long")).text == "x" * 40


async def test_usage_is_settled_by_its_own_gateway_or_by_one_that_was_told_of_it(
    bench: Any, submit: Any, tmp_path: Path
) -> None:
    first, second = zmq.curve_keypair(), zmq.curve_keypair()
    file = write(tmp_path / "gateways", first[0], second[0])
    now_s = [0.0]
    async with bench(
        curve_secret_key=ENGINE[1], gateway_keys_file=file, clock=lambda: now_s[0], silence_limit_s=20.0
    ) as running:
        gateway, other = await ask_for_billing(running, first, submit), running.connect(**options(second))
        await other.send(Hello("other", replica_id="second"), UsageAcknowledgement("first", ["paid"]))
        await other.until_load(lambda load: running.front.stats().num_refused == 1)
        assert running.front.stats().num_unacknowledged == 1
        impostor = running.connect(**options(second))
        await impostor.send(Hello("impostor", replica_id="first"), UsageAcknowledgement("first", ["paid"]))
        await other.until_load(lambda load: running.front.stats().num_refused == 3)
        assert running.front.stats().num_unacknowledged == 1 and not impostor.cards
        gateway.socket.close()
        told: list[UnacknowledgedUsage] = []
        while not told:  # the engine has given the first gateway up, and hears from the other
            now_s[0] += 1
            message = await other.keep_alive_and_receive()
            told += [message] if isinstance(message, UnacknowledgedUsage) else []
        assert [record.request_id for record in told[0].records] == ["paid"]
        await other.send(UsageAcknowledgement("first", ["paid"]))
        await other.until_load(lambda load: running.front.stats().num_unacknowledged == 0)


async def test_only_gateways_that_may_send_requests_are_told_of_usage_and_of_the_secret_of_transfers(
    bench: Any, submit: Any, tmp_path: Path
) -> None:
    serving, successor, ruling = zmq.curve_keypair(), zmq.curve_keypair(), zmq.curve_keypair()
    lines = serving[0] + b" inference", successor[0] + b" inference", ruling[0] + b" administration"
    file, now_s = write(tmp_path / "gateways", *lines), [0.0]
    async with bench(
        curve_secret_key=ENGINE[1], gateway_keys_file=file, clock=lambda: now_s[0], silence_limit_s=20.0
    ) as running:
        running.front.card = msgspec.structs.replace(running.front.card, kv_secret="secret", publishes_prefixes=True)
        gateway, ruler = running.connect(**options(serving)), running.connect(**options(ruling))
        await gateway.send(Hello("gateway", replica_id="first"))
        await gateway.ask(submit("paid", billing_context=b"bill"))
        await ruler.send(Hello("ruler", replica_id="ruler"))
        await ruler.until(lambda: ruler.cards)
        assert (gateway.cards[0].kv_secret, ruler.cards[0].kv_secret) == ("secret", "")
        assert [one.cards[0].publishes_prefixes for one in (gateway, ruler)] == [True, False]
        gateway.socket.close()
        heard: list[object] = []
        while now_s[0] < 60.0:  # the engine has given the first one up long since
            now_s[0] += 1
            heard.append(await ruler.keep_alive_and_receive())
        assert not any(isinstance(message, UnacknowledgedUsage) for message in heard)
        assert running.front.stats().num_unacknowledged == 1
        other = running.connect(**options(successor))
        await other.send(Hello("other", replica_id="second"))
        while not isinstance(await other.keep_alive_and_receive(), UnacknowledgedUsage):
            now_s[0] += 1


async def test_the_sessions_of_a_key_that_was_taken_out_of_the_list_end(
    bench: Any, submit: Any, tmp_path: Path
) -> None:
    kept, removed = zmq.curve_keypair(), zmq.curve_keypair()
    file = write(tmp_path / "gateways", kept[0], removed[0])
    script = Script(step_delay_s=0.01)
    async with bench(script, curve_secret_key=ENGINE[1], gateway_keys_file=file) as running:
        gateway, other = running.connect(**options(removed)), running.connect(**options(kept))
        await gateway.greet()
        await other.greet()
        await gateway.send(submit("endless", "x" * 90))
        await gateway.until(lambda: "endless" in gateway.answers and gateway.answers["endless"].pieces)
        write(file, kept[0])
        await other.until_load(lambda load: running.front.stats().num_gateways == 1 and load.num_running == 0)
        await gateway.send(Heartbeat(1), submit("again"))
        await other.until_load(lambda load: running.front.stats().num_refused >= 2)
        assert "again" not in gateway.answers and running.front.stats().num_gateways == 1
        assert (await other.ask(submit("goes on"))).text == "hello"


async def test_a_list_that_cannot_be_read_for_a_while_ends_no_session(bench: Any, submit: Any, tmp_path: Path) -> None:
    keys = zmq.curve_keypair()
    file = write(tmp_path / "gateways", keys[0])
    async with bench(curve_secret_key=ENGINE[1], gateway_keys_file=file) as running:
        gateway = running.connect(**options(keys))
        await gateway.greet()
        write(file, b"half a ke")
        seen = len(gateway.loads)
        await gateway.until_load(lambda load: len(gateway.loads) > seen + 3)
        assert (await gateway.ask(submit("goes on"))).text == "hello"


async def test_without_a_list_a_key_still_keeps_its_identity_and_its_usage(
    bench: Callable[..., Any], submit: Callable[..., Any]
) -> None:
    first, second = zmq.curve_keypair(), zmq.curve_keypair()
    async with bench(curve_secret_key=ENGINE[1]) as running:
        gateway, other = await ask_for_billing(running, first, submit), running.connect(**options(second))
        await other.send(Hello("other", replica_id="first"), UsageAcknowledgement("first", ["paid"]))
        await gateway.until_load(lambda load: running.front.stats().num_refused == 2)
        assert running.front.stats().num_unacknowledged == 1


def test_refusals_are_all_counted_and_few_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    permissions = GatewayPermissions(None)
    session = GatewaySession(b"one", 0.0)
    for _ in range(100):
        permissions.note_refusal(session, Heartbeat(0), "of no use")
    permissions.begin_interval()
    permissions.note_refusal(session, Heartbeat(0), "of no use")
    assert permissions.num_refused == 101
    assert capsys.readouterr().out.count("gateway_message_refused") == LOGGED_PER_INTERVAL + 1


async def test_many_gateways_with_one_key_serve_beside_each_other(bench: Any, submit: Any, tmp_path: Path) -> None:
    keys = zmq.curve_keypair()
    file = write(tmp_path / "gateways", keys[0])
    async with bench(curve_secret_key=ENGINE[1], gateway_keys_file=file) as running:
        gateways = [running.connect(**options(keys)) for _ in range(4)]
        for number, gateway in enumerate(gateways):
            await gateway.send(Hello(f"gateway-{number}", replica_id=f"replica-{number}"))
        answers = await asyncio.gather(*(gateway.ask(submit("same id")) for gateway in gateways))
        assert [answer.text for answer in answers] == ["hello"] * 4
        assert running.front.stats().num_refused == 0
