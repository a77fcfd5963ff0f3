"""Receipts over HTTP and on the command line: what they say, what verifies, and what does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.receipts import verify_receipt
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.receipts.content import commitment, hash_of
from moiety_platform.receipts.signing import BadReceiptKey, key_id_of, load_signer
from moiety_platform.receipts.verification import (
    InvalidReceipt,
    check_chain,
    check_receipt,
    find_difference,
    public_keys_of,
)

from .conftest import NewCard, RunningGateway, StartGateway

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 7,
    "return_token_ids": True,
}  # fmt: skip
ASK = {"x-moiety-receipt": "1"}


@pytest.fixture
def engine(new_card: NewCard) -> FakeEngineClient:
    card = new_card("engine-1", "tiny")
    return FakeEngineClient(msgspec.structs.replace(card, model_digest="d" * 64, layout="tp=2", batch_invariant=True))


@pytest.fixture
async def gateway(start_gateway: StartGateway, engine: FakeEngineClient) -> AsyncIterator[RunningGateway]:
    async with start_gateway([engine], stores_usage=True) as running:
        await running.admin("PUT", "/prices", {"model": "tiny", "input": "1", "output": "2"})
        yield running


async def ask(gateway: RunningGateway, body: dict[str, Any] = CHAT, headers: Any = ASK, path: str = PATH) -> Any:
    status, _, answer = await gateway.post(path, body, headers=headers)
    assert status == 200, answer
    return json.loads(answer)


async def receipt_of(gateway: RunningGateway, request_id: str, expect: int = 200) -> Any:
    status, _, answer = await gateway.request("GET", f"/v1/receipts/{request_id}")
    assert status == expect, answer
    return json.loads(answer)


async def keys_of(gateway: RunningGateway) -> dict[str, bytes]:
    status, _, answer = await gateway.request("GET", "/v1/receipts/keys", headers={"Authorization": None})
    assert status == 200
    return public_keys_of(json.loads(answer))


async def test_a_receipt_says_what_was_computed_by_what_and_for_how_much(gateway: RunningGateway) -> None:
    answer = await ask(gateway, CHAT | {"temperature": 0.5, "top_p": 0.9})
    envelope = await receipt_of(gateway, answer["id"])
    content = check_receipt(envelope, await keys_of(gateway))
    usage = answer["usage"]
    assert content["usage"] == {
        "num_choices": 1, "prompt_tokens": usage["prompt_tokens"], "cached_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }  # fmt: skip
    cost = usage["prompt_tokens"] * 1000 + usage["completion_tokens"] * 2000
    assert content["price"]["cost_nanodollars"] == cost
    assert content["price"]["rates_nanodollars_per_million"] == {
        "input": 10**9, "cached_input": 10**9, "output": 2 * 10**9,
    }  # fmt: skip
    assert content["price"]["service_class"] == "standard"
    (engine,) = content["engines"]
    assert (engine["model_digest"], engine["layout"], engine["batch_invariant"]) == ("d" * 64, "tp=2", True)
    sampling = content["settings"]["sampling"]
    assert (sampling["seed"], sampling["temperature"], sampling["top_p"]) == (7, 0.5, 0.9)
    assert (content["request"]["request_id"], content["request"]["model"]) == (answer["id"], "tiny")
    assert (content["sequence"], content["previous"]) == (1, "0" * 64)
    assert find_difference(envelope, [answer["prompt_token_ids"]], [answer["choices"][0]["token_ids"]]) is None
    (row,) = (await gateway.admin("GET", "/usage/requests"))["data"]
    assert row["cost_nanodollars"] == cost


async def test_other_tokens_and_other_content_do_not_verify(gateway: RunningGateway) -> None:
    answer = await ask(gateway)
    envelope = await receipt_of(gateway, answer["id"])
    keys = await keys_of(gateway)
    prompt, output = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert "answer 0 differs" in str(find_difference(envelope, [prompt], [[*output[:-1], output[-1] + 1]]))
    assert "prompt 0 differs" in str(find_difference(envelope, [prompt[1:]], [output]))
    content = envelope["receipt"]
    cheaper = content | {"price": content["price"] | {"cost_nanodollars": 0}}
    with pytest.raises(InvalidReceipt, match="its hash is not"):
        check_receipt(envelope | {"receipt": cheaper}, keys)
    with pytest.raises(InvalidReceipt, match="was changed, or is not signed"):
        check_receipt(envelope | {"receipt": cheaper, "hash": hash_of(cheaper)}, keys)
    other = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    with pytest.raises(InvalidReceipt, match="not among the published keys"):
        check_receipt(envelope, {key_id_of(other): other})
    with pytest.raises(InvalidReceipt, match="is not signed by the key"):
        check_receipt(envelope, {envelope["signature"]["key_id"]: other})


async def test_the_same_tokens_have_another_commitment_in_each_receipt(gateway: RunningGateway) -> None:
    first, second = [await receipt_of(gateway, (await ask(gateway))["id"]) for _ in range(2)]
    assert first["receipt"]["commitments"] != second["receipt"]["commitments"]
    salt = first["opening"]["salt"]
    again = await receipt_of(gateway, (await ask(gateway, headers={"x-moiety-receipt": f"1; salt={salt}"}))["id"])
    assert again["receipt"]["commitments"] == first["receipt"]["commitments"], "for a recomputation"


async def test_receipts_of_a_tenant_are_one_chain(gateway: RunningGateway) -> None:
    answers = await asyncio.gather(*(ask(gateway) for _ in range(12)))
    envelopes = [await receipt_of(gateway, answer["id"]) for answer in answers]
    contents = [check_receipt(one, await keys_of(gateway)) for one in envelopes]
    assert sorted(one["sequence"] for one in contents) == list(range(1, 13))
    assert check_chain(contents) == 12
    status, _, listed = await gateway.request("GET", "/v1/receipts?after=3&limit=5")
    page = json.loads(listed)
    assert status == 200 and page["has_more"]
    assert [one["receipt"]["sequence"] for one in page["data"]] == [4, 5, 6, 7, 8]
    forged = [one for one in contents if one["sequence"] != 5]
    forged.append(contents[0] | {"sequence": 5})
    with pytest.raises(InvalidReceipt):
        check_chain(forged)


async def test_a_request_without_a_receipt_writes_none_and_gets_one_later_without_commitments(
    gateway: RunningGateway,
) -> None:
    answer = await ask(gateway, headers={})
    await gateway.stored_usage.flush()
    _, _, listed = await gateway.request("GET", "/v1/receipts")
    assert json.loads(listed)["data"] == []
    envelope = await receipt_of(gateway, answer["id"])
    content = check_receipt(envelope, await keys_of(gateway))
    assert (content["commitments"], content["settings"], content["engines"], envelope["opening"]) == (None,) * 4
    assert content["usage"]["output_tokens"] == answer["usage"]["completion_tokens"]
    assert await receipt_of(gateway, answer["id"]) == envelope, "issued once"
    assert content["sequence"] == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": ["one", "two"], "max_tokens": 2, "n": 2}),
        ("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 3}),
        ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        (PATH, CHAT | {"stream": True}),
    ],
)
async def test_every_api_gives_receipts(gateway: RunningGateway, path: str, body: dict[str, Any]) -> None:
    status, _, answer = await gateway.post(path, body, headers=ASK)
    assert status == 200
    await gateway.stored_usage.flush()
    _, _, listed = await gateway.request("GET", "/v1/receipts")
    (envelope,) = json.loads(listed)["data"]
    content = check_receipt(envelope, await keys_of(gateway))
    assert content["request"]["request_id"].encode() in answer
    assert content["request"]["endpoint"] == path
    num_prompts = len(body["prompt"]) if "prompt" in body else 1
    assert len(content["commitments"]["prompts"]) == num_prompts
    assert len(content["commitments"]["answers"]) == num_prompts * body.get("n", 1)


async def test_metadata_asks_for_a_receipt_also_in_the_line_of_a_batch(gateway: RunningGateway) -> None:
    asked = CHAT | {"metadata": {"moiety_receipt": "1"}}
    answer = await ask(gateway, asked, headers={})
    assert (await receipt_of(gateway, answer["id"]))["opening"] is not None
    line = {"custom_id": "a", "method": "POST", "url": PATH, "body": asked}
    await gateway.run_batch(json.dumps(line).encode() + b"\n")
    await gateway.stored_usage.flush()
    _, _, listed = await gateway.request("GET", "/v1/receipts")
    second = json.loads(listed)["data"][1]["receipt"]
    assert second["commitments"] is not None
    assert second["price"]["service_class"] == "batch"


@pytest.mark.parametrize("value", ["yes", "0", "1; salt=xyz", "1; salt=" + "A" * 32])
async def test_another_value_of_the_header_is_refused(gateway: RunningGateway, value: str) -> None:
    status, _, answer = await gateway.post(PATH, CHAT, headers={"x-moiety-receipt": value})
    assert (status, json.loads(answer)["error"]["code"]) == (400, "invalid_receipt_header")


async def test_unknown_requests_have_no_receipt(gateway: RunningGateway) -> None:
    refused = await receipt_of(gateway, "chatcmpl-unknown", 404)
    assert refused["error"]["code"] == "receipt_not_found"


async def test_public_keys_need_no_api_key_and_few_statements(gateway: RunningGateway) -> None:
    await receipt_of(gateway, (await ask(gateway))["id"])
    await keys_of(gateway)
    status, _, answer = await gateway.request("GET", "/v1/receipts/keys", headers={"Authorization": None})
    (key,) = json.loads(answer)["keys"]
    assert status == 200 and set(key) == {"kty", "crv", "use", "alg", "kid", "x"}
    statements: list[str] = []
    sa.event.listen(
        gateway.database.engine.sync_engine, "before_cursor_execute", lambda *args: statements.append(args[2])
    )
    for _ in range(20):
        await keys_of(gateway)
    assert sum("receipt_keys" in statement for statement in statements) <= 1


async def test_a_receipt_is_of_its_project_alone(gateway: RunningGateway) -> None:
    answer = await ask(gateway)
    (tenant,) = (await gateway.admin("GET", "/tenants"))["data"]
    project = await gateway.admin("POST", "/projects", {"name": "other", "tenant_id": tenant["id"]}, 201)
    made = await gateway.admin("POST", "/keys", {"project_id": project["id"], "name": "other"}, 201)
    for target in (f"/v1/receipts/{answer['id']}", "/v1/receipts"):
        status, _, found = await gateway.request("GET", target, key=made["secret"])
        assert (status, answer["id"].encode() in found) in ((404, False), (200, False)), target
    assert (await receipt_of(gateway, answer["id"]))["receipt"]["sequence"] == 1


async def test_a_rotated_key_leaves_old_receipts_verifiable(
    start_gateway: StartGateway, engine: FakeEngineClient, tmp_path: Path
) -> None:
    file = tmp_path / "keys.pem"
    old = load_signer(file)
    assert file.stat().st_mode & 0o777 == 0o600
    async with start_gateway([engine], stores_usage=True, receipt_key_file=file) as gateway:
        envelope = await receipt_of(gateway, (await ask(gateway))["id"])
        assert envelope["signature"]["key_id"] == old.key_id
        file.unlink()
        gateway.assembled.services.receipts.signer = load_signer(file)
        renewed = await receipt_of(gateway, envelope["receipt"]["request"]["request_id"])
        assert renewed["signature"]["key_id"] != old.key_id
        assert (renewed["receipt"], renewed["hash"]) == (envelope["receipt"], envelope["hash"])
        keys = await keys_of(gateway)
        assert check_receipt(envelope, keys) == check_receipt(renewed, keys)


def pem_of(key: Any) -> bytes:
    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem


def test_of_several_keys_in_the_file_the_first_signs_and_all_are_published(tmp_path: Path) -> None:
    file = tmp_path / "keys.pem"
    keys = [Ed25519PrivateKey.generate() for _ in range(3)]
    file.write_bytes(b"".join(map(pem_of, keys)))
    file.chmod(0o600)
    signer = load_signer(file)
    assert signer.public_keys == [key.public_key().public_bytes_raw() for key in keys]
    assert signer.key_id == key_id_of(signer.public_keys[0])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "no PEM block"),
        (b"-----BEGIN PRIVATE KEY-----\nnonsense\n-----END PRIVATE KEY-----\n", "cannot be read"),
        (pem_of(X25519PrivateKey.generate()), "another kind"),
    ],
)
def test_an_unusable_file_of_keys_is_refused_at_the_start(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "keys.pem").write_bytes(content)
    (tmp_path / "keys.pem").chmod(0o600)
    with pytest.raises(BadReceiptKey, match=complaint):
        load_signer(tmp_path / "keys.pem")


def test_a_commitment_depends_on_every_token_and_on_their_order() -> None:
    salt = "0" * 32
    all_of = {commitment(salt, ids) for ids in ([], [1], [1, 2], [2, 1], [0, 1], [2**31])}
    assert len(all_of) == 6
    assert commitment("1" * 32, [1]) != commitment(salt, [1])


async def test_the_command_verifies_offline_and_recomputes(
    gateway: RunningGateway, engine: FakeEngineClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = await ask(gateway)
    envelope = await receipt_of(gateway, answer["id"])
    _, _, keys = await gateway.request("GET", "/v1/receipts/keys")
    files = {"receipt": envelope, "keys": json.loads(keys), "answer": answer, "request": CHAT}
    paths = {}
    for name, content in files.items():
        paths[name] = tmp_path / f"{name}.json"
        paths[name].write_text(json.dumps(content))
    run = paths["receipt"], str(paths["keys"])

    async def verify(*args: Any, **options: Any) -> str:
        await asyncio.to_thread(verify_receipt, *args, **{"answer": None, "recompute": None, **options})
        return capsys.readouterr().out

    assert "unchanged receipts: 1; verified links of the chain: 1" in await verify(*run)
    assert "are those of the receipt" in await verify(*run, answer=paths["answer"])
    again = {"recompute": gateway.url, "request": paths["request"], "key": gateway.key, "answer": paths["answer"]}
    said = await verify(paths["receipt"], gateway.url, **again)
    assert f"all {answer['usage']['completion_tokens']} tokens are equal" in said

    with pytest.raises(CommandError, match="needs the request's body"):
        await verify(*run, recompute=gateway.url, request=None, key=gateway.key)
    engine.card = msgspec.structs.replace(engine.card, model_digest="e" * 64)
    with pytest.raises(CommandError, match="another engine computed"):
        await verify(*run, **again)
    engine.card = msgspec.structs.replace(engine.card, model_digest="d" * 64)
    paths["request"].write_text(json.dumps(CHAT | {"messages": [{"role": "user", "content": "other"}]}))
    with pytest.raises(CommandError, match="the prompt differs"):
        await verify(*run, **again)
    paths["request"].write_text(json.dumps(CHAT | {"max_tokens": 2}))
    with pytest.raises(CommandError, match="choice 0 differs from token 2 on"):
        await verify(*run, **again)
    paths["receipt"].write_text(json.dumps(envelope | {"hash": "0" * 64}))
    with pytest.raises(CommandError, match="its hash is not"):
        await verify(*run)


async def test_an_answer_that_was_sampled_without_a_seed_is_not_recomputed(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    body = {name: value for name, value in CHAT.items() if name != "seed"} | {"temperature": 1.0}
    envelope = await receipt_of(gateway, (await ask(gateway, body))["id"])
    (tmp_path / "receipt.json").write_text(json.dumps(envelope))
    (tmp_path / "body.json").write_text(json.dumps(body))
    with pytest.raises(CommandError, match="without a seed"):
        await asyncio.to_thread(
            verify_receipt, tmp_path / "receipt.json", gateway.url, answer=None, recompute=gateway.url,
            request=tmp_path / "body.json", key=gateway.key,
        )  # fmt: skip
