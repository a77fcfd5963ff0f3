from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import zmq

from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_engine.scripted.text_model import ASSISTANT_ID, END_ID, USER_ID, VOCAB_SIZE
from moiety_engine.server.core_link import CoreEvents
from moiety_engine.server.engine_server import Ending
from moiety_wire.codec import decode_notes
from moiety_wire.engine_load import Load
from moiety_wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Extend,
    Failed,
    FailureCode,
    Finished,
    FinishReason,
    Heartbeat,
    Hello,
    ModelCard,
    Sampling,
    Stopping,
)


async def test_a_hello_is_answered_by_the_card_and_the_load(bench: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        card = await gateway.greet()
        assert (card.model, card.family, card.vocab_size) == ("scripted", "scripted", VOCAB_SIZE)
        assert (card.eos_token_ids, card.engine_id) == ((END_ID,), running.front.engine_id)
        assert gateway.loads[0].kv_blocks_total == 65_536 or gateway.loads[0].steps_total == 0


async def test_loads_go_on_in_order_while_nothing_happens(bench: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        await gateway.greet()
        await gateway.until(lambda: len(gateway.loads) == 4)
        assert [load.seq for load in gateway.loads] == [0, 1, 2, 3]


class LateCore(ScriptedCore):
    """A core that becomes ready when the test says so."""

    async def start(self, events: CoreEvents) -> None:
        self.start_now = lambda: super(LateCore, self).start(events)


async def test_before_the_core_is_ready_a_hello_waits_and_a_submit_is_refused(bench: Any, submit: Any) -> None:
    core = LateCore(Script())
    async with bench(core=core, wait_ready=False) as running:
        gateway = running.connect()
        await gateway.send(Hello("gateway"))
        answer = await gateway.ask(submit())
        assert answer.end.code is FailureCode.OVERLOADED
        assert not gateway.cards
        await core.start_now()
        assert isinstance(await gateway.receive(), ModelCard)
        assert isinstance(await gateway.receive(), Load)


async def test_a_request_is_accepted_streamed_without_gap_and_finished(bench: Any, submit: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        await gateway.send(submit(prompt="naïve 東京 🙂!"))
        assert isinstance(await gateway.receive(), Accepted)
        answer = await gateway.finish()
        assert answer.text == "naïve 東京 🙂!"
        assert "".join(answer.pieces) == answer.text
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in answer.pieces)
        assert answer.token_ids == [*"naïve 東京 🙂!".encode(), END_ID]
        end = answer.end
        assert (end.reason, end.detail, end.num_prompt_tokens) == (
            FinishReason.STOP,
            "stop_token",
            len("naïve 東京 🙂!".encode()),
        )
        phases = end.phases
        assert 0 < phases.received_unix_ns <= phases.scheduled_unix_ns <= phases.first_token_unix_ns
        assert phases.first_token_unix_ns <= phases.finished_unix_ns


async def test_a_request_in_a_trace_is_told_the_steps_that_it_ran_in(bench: Any, submit: Any) -> None:
    async with bench(Script(traced_steps_per_s=1000.0, step_delay_s=0.002)) as running:
        gateway = running.connect()
        context = f"00-{'ab' * 16}-{'cd' * 8}-01"
        for one in (submit("traced", "hello", traceparent=context), submit("other", "hello, too")):
            await gateway.send(one)
        traced, other = await gateway.finish("traced"), await gateway.finish("other")
        assert other.end.steps == b"", "nobody would look at them"
        notes = decode_notes(traced.end.steps)
        assert notes.num_seen == len(notes.steps) == 6, "the prompt, and each token after the first"
        assert [step.num_prefills + step.num_decodes for step in notes.steps][:1] in ([1], [2])
        numbers = [step.number for step in notes.steps]
        assert numbers == list(range(numbers[0], numbers[0] + 6))
        assert notes.steps[0].num_prefill_tokens >= len("hello")
        for step in notes.steps:
            assert step.classes == {"standard": step.num_prefills + step.num_decodes}, "the first one's too"
        assert all((step.num_decodes, step.classes) == (2, {"standard": 2}) for step in notes.steps[2:5])


async def test_special_tokens_are_no_text_unless_they_are_to_be_shown(bench: Any, submit: Any) -> None:
    async with bench(Script(tokens=(*b"a", USER_ID, *b"b", ASSISTANT_ID))) as running:
        gateway = running.connect()
        assert (await gateway.ask(submit("plain"))).text == "ab"
        shown = await gateway.ask(submit("shown", shown_ids=(USER_ID,)))
        assert shown.text == "a<|user|>b"
        other = gateway.answers["resumed"] = type(shown)(shown.token_ids[:2], "a<|user|>")
        resumed = await gateway.ask(submit("resumed", shown_ids=(USER_ID,), resumed_ids=shown.token_ids[:2]))
        assert resumed is other and resumed.text == shown.text
        refused = await gateway.ask(submit("bad", shown_ids=(VOCAB_SIZE,)))
        assert (refused.end.code, "in shown_ids" in refused.end.message) == (FailureCode.INVALID_REQUEST, True)


async def test_a_code_point_that_the_end_cuts_comes_with_the_end(bench: Any, submit: Any) -> None:
    async with bench() as running:
        answer = await running.connect().ask(submit(prompt="a東", stopping=Stopping(max_tokens=3)))
        assert answer.pieces == ["a", "", ""]
        assert answer.end.text == "\N{REPLACEMENT CHARACTER}"
        assert (answer.end.reason, answer.end.detail) == (FinishReason.LENGTH, "max_tokens")


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 5, 100])
async def test_a_stop_string_over_many_pieces_ends_with_the_token_that_completes_it(
    bench: Any, submit: Any, tokens_per_step: int
) -> None:
    async with bench(Script(tokens_per_step=tokens_per_step)) as running:
        stopping = Stopping(max_tokens=50, stop=("STOPPED", "STOP", "stop"))
        gateway = running.connect()
        answer = await gateway.ask(submit(prompt="one STO two STOPPED three", stopping=stopping))
        assert answer.text == "one STO two "
        assert (answer.end.reason, answer.end.detail) == (FinishReason.STOP, "STOP")
        assert len(answer.token_ids) == len("one STO two STOP")
        await gateway.greet()
        await gateway.until_idle()


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
async def test_an_included_stop_string_ends_the_text(bench: Any, submit: Any, tokens_per_step: int) -> None:
    async with bench(Script(tokens_per_step=tokens_per_step)) as running:
        gateway = running.connect()
        stopping = Stopping(max_tokens=50, stop=("STOP",), includes_stop=True)
        answer = await gateway.ask(submit("string", prompt="one STO two STOPPED", stopping=stopping))
        assert (answer.text, answer.end.detail) == ("one STO two STOP", "STOP")
        stopping = Stopping(max_tokens=50, stop_token_ids=(ord("c"),), includes_stop=True)
        answer = await gateway.ask(submit("id", prompt="abcd", stopping=stopping))
        assert (answer.text, answer.token_ids) == ("abc", [*b"abc"])


async def test_stop_strings_are_not_looked_for_before_min_tokens(bench: Any, submit: Any) -> None:
    async with bench() as running:
        stopping = Stopping(max_tokens=50, min_tokens=6, stop=("b",))
        answer = await running.connect().ask(submit(prompt="ab.ab.ab.", stopping=stopping))
        assert (answer.text, len(answer.token_ids)) == ("ab.ab.a", 8)


async def test_text_held_back_for_a_stop_that_never_comes_is_given_at_the_end(bench: Any, submit: Any) -> None:
    async with bench() as running:
        answer = await running.connect().ask(submit(prompt="so ST", stopping=Stopping(max_tokens=50, stop=("STOP",))))
        assert (answer.text, answer.end.text, answer.end.reason) == ("so ST", "ST", FinishReason.STOP)


async def test_a_stop_id_ends_without_being_text(bench: Any, submit: Any) -> None:
    async with bench() as running:
        stopping = Stopping(max_tokens=50, stop_token_ids=(ord("c"),))
        answer = await running.connect().ask(submit(prompt="abcd", stopping=stopping))
        assert (answer.text, answer.token_ids) == ("ab", [*b"abc"])


async def test_ignored_end_tokens_do_not_end(bench: Any, submit: Any) -> None:
    async with bench() as running:
        answer = await running.connect().ask(submit(prompt="ab", stopping=Stopping(max_tokens=5, ignore_eos=True)))
        assert (answer.text, answer.end.detail) == ("ababa", "max_tokens")


async def test_max_tokens_is_clipped_to_the_context(bench: Any, submit: Any) -> None:
    async with bench(Script(max_context_tokens=10)) as running:
        stopping = Stopping(max_tokens=100, ignore_eos=True)
        answer = await running.connect().ask(submit(prompt="abcdef", stopping=stopping))
        assert (len(answer.token_ids), answer.end.reason, answer.end.detail) == (4, FinishReason.LENGTH, "context")


async def test_a_prompt_that_fills_the_context_fails_with_both_lengths(bench: Any, submit: Any) -> None:
    async with bench(Script(max_context_tokens=10)) as running:
        answer = await running.connect().ask(submit(prompt="a" * 10))
        assert answer.end.code is FailureCode.CONTEXT_LENGTH_EXCEEDED
        assert "10 tokens" in answer.end.message and "is 10 tokens" in answer.end.message
        shorter = await running.connect().ask(submit(prompt="a" * 9))
        assert len(shorter.token_ids) == 1


BAD = [
    {"prompt_ids": []},
    {"prompt_ids": [-1]},
    {"prompt_ids": [VOCAB_SIZE]},
    {"prompt_ids": [2**63]},
    {"credit_tokens": -1},
    {"tenant_weight": float("nan")},
    {"sampling": Sampling(temperature=-0.1)},
    {"sampling": Sampling(temperature=float("nan"))},
    {"sampling": Sampling(temperature=float("inf"))},
    {"sampling": Sampling(top_p=1.1)},
    {"sampling": Sampling(min_p=-1)},
    {"sampling": Sampling(num_prompt_logprobs=0, prompt_logprobs_from=0)},
    {"sampling": Sampling(top_k=-1)},
    {"sampling": Sampling(repetition_penalty=0.0)},
    {"sampling": Sampling(presence_penalty=float("inf"))},
    {"sampling": Sampling(logit_bias={VOCAB_SIZE: 1.0})},
    {"sampling": Sampling(logit_bias={1: float("nan")})},
    {"sampling": Sampling(num_logprobs=21)},
    {"stopping": Stopping(max_tokens=0)},
    {"stopping": Stopping(max_tokens=5, min_tokens=6)},
    {"stopping": Stopping(max_tokens=5, stop=("",))},
    {"stopping": Stopping(max_tokens=5, stop=("x" * 5000,))},
    {"stopping": Stopping(max_tokens=5, stop=tuple(map(str, range(65))))},
    {"stopping": Stopping(max_tokens=5, stop_token_ids=(-1,))},
]


async def test_invalid_requests_fail_with_a_reason_and_the_engine_continues(bench: Any, submit: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        for i, changes in enumerate(BAD):
            answer = await gateway.ask(submit(f"bad-{i}", **changes))
            assert isinstance(answer.end, Failed), changes
            assert answer.end.code is FailureCode.INVALID_REQUEST, changes
            assert answer.end.message, changes
        unknown = await gateway.ask(submit("unknown", model="other"))
        assert unknown.end.code is FailureCode.UNKNOWN_MODEL
        assert (await gateway.ask(submit("good"))).text == "hello"


async def test_a_request_id_that_is_still_open_is_refused(bench: Any, submit: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        await gateway.send(submit(credit_tokens=0))
        await gateway.receive()
        await gateway.send(submit())
        await gateway.socket.recv()  # its numbers start again, so it is looked at by hand
        await gateway.send(Abort("r", 2))
        answer = await gateway.finish()
        assert answer.end.reason is FinishReason.ABORT
        assert (await gateway.ask(submit("next"))).text == "hello"


async def test_two_gateways_may_use_the_same_request_id(bench: Any, submit: Any) -> None:
    async with bench() as running:
        one, two = running.connect(), running.connect()
        await one.send(submit(prompt="first"))
        await two.send(submit(prompt="second"))
        assert ((await one.finish()).text, (await two.finish()).text) == ("first", "second")


async def test_credit_pauses_a_request_and_an_extension_lets_it_go_on(bench: Any, submit: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        await gateway.greet()
        await gateway.send(submit(prompt="abcdef", credit_tokens=2))
        await gateway.until(lambda: gateway.loads[-1].num_paused == 1)
        assert gateway.answers["r"].text == "ab"
        await gateway.send(Extend("r", 1, 4), Extend("r", 2, 3))
        await gateway.until(lambda: gateway.answers["r"].text == "abcd")
        await gateway.until(lambda: gateway.loads[-1].num_paused == 1)
        await gateway.send(Extend("r", 3, 5, last=True))
        answer = await gateway.finish()
        assert (answer.text, answer.end.reason, answer.end.detail) == ("abcde", FinishReason.LENGTH, "credit_refused")


async def test_an_abort_ends_a_request_and_frees_its_blocks(bench: Any, submit: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        await gateway.greet()
        await gateway.send(submit(credit_tokens=2))
        await gateway.until(lambda: gateway.loads[-1].kv_blocks_used > 0 and gateway.loads[-1].num_paused)
        await gateway.send(Abort("r", 1), Abort("r", 2), Abort("never", 0))
        answer = await gateway.finish()
        assert (answer.end.reason, answer.end.num_output_tokens) == (FinishReason.ABORT, 2)
        await gateway.until_idle()


@pytest.mark.parametrize("listen", ["tcp", "ipc"])
async def test_a_gateway_that_goes_away_takes_its_requests_along(
    bench: Any, submit: Any, listen: str, tmp_path: Any
) -> None:
    address = "tcp://127.0.0.1:0" if listen == "tcp" else f"ipc://{tmp_path}/e.sock"
    async with bench(listen=address) as running:
        leaving, staying = running.connect(), running.connect()
        await staying.greet()
        await staying.send(submit(credit_tokens=3, prompt="stays"))
        await leaving.greet()
        await leaving.send(submit(credit_tokens=3))
        await leaving.until(lambda: leaving.answers and leaving.answers["r"].token_ids)
        await staying.until(lambda: staying.loads[-1].num_paused == 2)
        leaving.socket.close()
        await staying.until(lambda: staying.loads[-1].num_paused == 1)
        await staying.send(Extend("r", 1, 100))
        assert (await staying.finish()).text == "stays"
        await staying.until_idle()


async def test_requests_of_a_silent_gateway_are_aborted(bench: Any, submit: Any) -> None:
    now_s = 0.0
    async with bench(clock=lambda: now_s) as running:
        silent, alive = running.connect(), running.connect()
        await alive.greet()
        await silent.send(submit(credit_tokens=1))
        await silent.until(lambda: silent.answers["r"].token_ids if silent.answers else False)
        now_s = 4.0
        await alive.send(Heartbeat(0), Hello("gateway"))
        await alive.until(lambda: len(alive.cards) == 2)
        now_s = 6.0
        answer = await silent.finish()
        assert (answer.end.reason, answer.end.detail) == (FinishReason.ABORT, "silent_gateway")
        await alive.until_idle()


async def test_garbage_is_counted_and_harms_nobody(bench: Any, submit: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        await gateway.send(submit(credit_tokens=1))
        garbage: list[list[bytes]] = [
            [b""],
            [b"\xff" * 1000],
            [b"\x81\xa4type\xa5hello"],
            [b"\x91" * 100_000],
            [b"a", b"b"],
            [b"", b"x"],
        ]
        for frames in garbage:
            await gateway.socket.send_multipart(frames)
        await gateway.send(Extend("r", 1, 100))
        assert (await gateway.finish()).text == "hello"
        assert running.front.num_undecodable == len(garbage)


async def test_a_gateway_that_does_not_read_holds_up_nobody_and_misses_nothing(
    bench: Any, submit: Any, tmp_path: Any
) -> None:
    async with bench(send_high_water=200, clock=lambda: 0.0, listen=f"ipc://{tmp_path}/e.sock") as running:
        slow, quick = running.connect(RCVHWM=1), running.connect()
        stopping = Stopping(max_tokens=3000, ignore_eos=True)
        for i in range(4):
            await slow.send(submit(f"slow-{i}", prompt="x" * 50, stopping=stopping))
        for i in range(20):
            assert (await quick.ask(submit(f"quick-{i}"))).text == "hello"
        for i in range(4):
            assert (await slow.finish(f"slow-{i}")).text == "x" * 3000


async def test_a_gateway_that_never_reads_is_given_up(bench: Any, submit: Any, tmp_path: Any) -> None:
    listen = f"ipc://{tmp_path}/e.sock"
    async with bench(send_high_water=5, max_outbox_messages=50, listen=listen, clock=lambda: 0.0) as running:
        deaf, alive = running.connect(RCVHWM=1), running.connect()
        await alive.greet()
        stopping = Stopping(max_tokens=8000, ignore_eos=True)
        for i in range(40):
            await deaf.send(submit(f"deaf-{i}", prompt="x", stopping=stopping))
        await alive.until(lambda: alive.loads[-1].requests_total == 40)
        load = await alive.until_idle()
        assert load.output_tokens_total < 40 * 8000


async def test_logprobs_come_with_text_and_bytes(bench: Any, submit: Any) -> None:
    async with bench() as running:
        sampling = Sampling(num_logprobs=2)
        answer = await running.connect().ask(submit(prompt="é", sampling=sampling, stopping=Stopping(max_tokens=2)))
        assert [logprob.token_bytes for logprob in answer.logprobs] == [b"\xc3", b"\xa9"]
        assert [logprob.token for logprob in answer.logprobs] == ["\N{REPLACEMENT CHARACTER}"] * 2
        assert [top.token_bytes for top in answer.logprobs[0].top] == [b"\xc3", b"\xc4"]
        assert [(logprob.token_id, logprob.num_chars) for logprob in answer.logprobs] == [(0xC3, 0), (0xA9, 1)]


async def test_a_drain_lets_open_requests_end_and_takes_no_more(bench: Any, submit: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        await gateway.greet()
        await gateway.send(submit("open", credit_tokens=1))
        await gateway.until(lambda: "open" in gateway.answers)
        running.front.begin_drain()
        await gateway.until(lambda: gateway.loads[-1].draining)
        refused = await gateway.ask(submit("late"))
        assert refused.end.code is FailureCode.DRAINING
        await gateway.send(Extend("open", 1, 100))
        ending, answer = await asyncio.gather(running.front.wait(), gateway.finish("open"))
        assert (ending, answer.text) == (Ending.DRAINED, "hello")


async def test_a_drain_that_takes_too_long_aborts_what_is_open(bench: Any, submit: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        await gateway.send(submit(credit_tokens=1))
        await gateway.receive()
        running.front.begin_drain(0.01)
        ending, answer = await asyncio.gather(running.front.wait(), gateway.finish())
        assert ending is Ending.DRAINED
        assert isinstance(answer.end, Finished)
        assert (answer.end.reason, answer.end.detail) == (FinishReason.ABORT, "draining")


async def test_with_curve_keys_only_gateways_that_know_the_engine_get_in(bench: Any, submit: Any) -> None:
    public, secret = zmq.curve_keypair()
    own_public, own_secret = zmq.curve_keypair()
    async with bench(curve_secret_key=secret) as running:
        stranger = running.connect()
        await stranger.send(submit("stranger"))
        known = running.connect(CURVE_SERVERKEY=public, CURVE_PUBLICKEY=own_public, CURVE_SECRETKEY=own_secret)
        assert (await known.ask(submit("known"))).text == "hello"
        await known.greet()
        assert known.loads[-1].requests_total == 1
        assert await stranger.socket.poll(0) == 0


async def test_only_listed_gateway_keys_get_in_and_the_list_is_read_anew(
    bench: Any, submit: Any, tmp_path: Any
) -> None:
    public, secret = zmq.curve_keypair()
    listed, added = zmq.curve_keypair(), zmq.curve_keypair()
    file = tmp_path / "gateways"
    file.write_bytes(b"# gateways\n" + listed[0] + b"\n")
    async with bench(curve_secret_key=secret, gateway_keys_file=file) as running:

        def connect(keys: tuple[bytes, bytes]) -> Any:
            return running.connect(CURVE_SERVERKEY=public, CURVE_PUBLICKEY=keys[0], CURVE_SECRETKEY=keys[1])

        stranger = connect(added)
        await stranger.send(submit("stranger"))
        known = connect(listed)
        assert (await known.ask(submit("known"))).text == "hello"
        await known.greet()
        assert known.loads[-1].requests_total == 1
        assert await stranger.socket.poll(0) == 0
        file.write_bytes(added[0] + b"\n")
        assert (await connect(added).ask(submit("added"))).text == "hello"


async def test_a_gateway_of_a_time_before_frames_of_several_messages_can_read_the_card_all_the_same(bench: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        await gateway.send(Hello("old", protocol_version=3))
        card = msgspec.msgpack.decode(await gateway.socket.recv(), type=ModelCard)
        assert card.protocol_version == PROTOCOL_VERSION
