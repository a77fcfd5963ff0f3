"""Attempts to forge receipts, to read those of others, and to make a request fail by asking for one."""

from __future__ import annotations

import asyncio
import json
import stat
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.receipts import verify_receipt
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.receipts.content import hash_of
from moiety_platform.receipts.signing import BadReceiptKey, load_signer
from moiety_platform.receipts.verification import (
    InvalidReceipt,
    check_chain,
    check_receipt,
    find_difference,
    missing_numbers,
)

from .conftest import NewCard, RunningGateway, StartGateway
from .test_receipts import ASK, CHAT, PATH, ask, keys_of, receipt_of


@pytest.fixture
async def gateway(start_gateway: StartGateway, new_card: NewCard) -> AsyncIterator[RunningGateway]:
    async with start_gateway([FakeEngineClient(new_card("engine-1", "tiny"))], stores_usage=True) as running:
        yield running


async def key_of_new_tenant(gateway: RunningGateway) -> str:
    tenant = await gateway.admin("POST", "/tenants", {"name": "rival"}, 201)
    project = await gateway.admin("POST", "/projects", {"name": "rival", "tenant_id": tenant["id"]}, 201)
    made = await gateway.admin("POST", "/keys", {"project_id": project["id"], "name": "rival"}, 201)
    secret: str = made["secret"]
    return secret


async def test_a_receipt_of_another_tenant_is_not_found_and_joins_no_chain_of_ours(gateway: RunningGateway) -> None:
    rival = await key_of_new_tenant(gateway)
    asked, plain = await ask(gateway), await ask(gateway, headers={})
    await gateway.stored_usage.flush()
    for answer in (asked, plain):
        status, _, body = await gateway.request("GET", f"/v1/receipts/{answer['id']}", key=rival)
        assert (status, json.loads(body)["error"]["code"]) == (404, "receipt_not_found")
    _, _, body = await gateway.request("GET", "/v1/receipts", key=rival)
    assert json.loads(body)["data"] == []
    keys = await keys_of(gateway)
    ours = check_receipt(await receipt_of(gateway, asked["id"]), keys)
    status, _, body = await gateway.post(PATH, CHAT, rival, ASK)
    assert status == 200
    _, _, body = await gateway.request("GET", f"/v1/receipts/{json.loads(body)['id']}", key=rival)
    theirs = json.loads(body)
    assert check_receipt(theirs, keys)["sequence"] == 1, "each tenant has its own chain"
    with pytest.raises(InvalidReceipt, match="of 2 tenants"):
        check_chain([ours, theirs["receipt"]])
    stolen = theirs["receipt"] | {"request": theirs["receipt"]["request"] | {"tenant_id": ours["request"]["tenant_id"]}}
    with pytest.raises(InvalidReceipt, match="is not signed"):
        check_receipt(theirs | {"receipt": stolen, "hash": hash_of(stolen)}, keys)


def leaves_of(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of all values of an object of JSON that are no objects."""
    if not isinstance(value, dict):
        return [path]
    return [leaf for name, inner in value.items() for leaf in leaves_of(inner, (*path, name))]


async def test_no_field_of_a_receipt_can_be_changed_removed_or_added(gateway: RunningGateway) -> None:
    envelope, keys = await receipt_of(gateway, (await ask(gateway))["id"]), await keys_of(gateway)
    text = json.dumps(envelope["receipt"])
    paths = leaves_of(envelope["receipt"])
    assert len(paths) > 30
    for path in paths:
        for change in ("replace", "remove", "add"):
            forged = json.loads(text)
            inner = forged
            for name in path[:-1]:
                inner = inner[name]
            if change == "replace":
                inner[path[-1]] = "forged" if path != ("version",) else 2
            elif change == "remove":
                del inner[path[-1]]
            else:
                inner["more"] = 1
            for claimed in (envelope["hash"], hash_of(forged)):
                with pytest.raises(InvalidReceipt):
                    check_receipt(envelope | {"receipt": forged, "hash": claimed}, keys)


@pytest.mark.parametrize(
    "change",
    [
        {"signature": None},
        {"signature": {"algorithm": "Ed25519", "key_id": ["a"], "value": ""}},
        {"hash": None},
        {"receipt": {"version": 1}},
        {"receipt": {"version": 1, "sequence": "\ud800", "request": {"request_id": "\ud800"}}},
        {"receipt": []},
    ],
)
async def test_a_malformed_receipt_is_refused(gateway: RunningGateway, change: dict[str, Any]) -> None:
    envelope, keys = await receipt_of(gateway, (await ask(gateway))["id"]), await keys_of(gateway)
    with pytest.raises(InvalidReceipt):
        check_receipt(envelope | change, keys)
    for value in (None, 1, "", "####", "AA=="):
        with pytest.raises(InvalidReceipt):
            check_receipt(envelope | {"signature": envelope["signature"] | {"value": value}}, keys)


async def test_a_replayed_or_changed_salt_fits_no_other_tokens(gateway: RunningGateway) -> None:
    answer = await ask(gateway)
    envelope = await receipt_of(gateway, answer["id"])
    salt = envelope["opening"]["salt"]
    other = CHAT | {"messages": [{"role": "user", "content": "something else"}]}
    replayed = await ask(gateway, other, {"x-moiety-receipt": f"1; salt={salt}"})
    second = await receipt_of(gateway, replayed["id"])
    assert (second["receipt"]["sequence"], second["opening"]["salt"]) == (2, salt)
    prompt, output = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert find_difference(second, [replayed["prompt_token_ids"]], [replayed["choices"][0]["token_ids"]]) is None
    assert "prompt 0 differs" in str(find_difference(second, [prompt], [output]))
    assert "prompt 0 differs" in str(find_difference(envelope | {"opening": {"salt": "0" * 32}}, [prompt], [output]))
    for bad in ("", "0" * 31, salt + "00", "x" * 32, 5, ["0" * 32]):
        with pytest.raises(InvalidReceipt, match="salt"):
            find_difference(envelope | {"opening": {"salt": bad}}, [prompt], [output])
    for ids in ([-1], [2**32], ["a"], [1.5]):
        with pytest.raises(InvalidReceipt, match="token ids"):
            find_difference(envelope, [ids], [output])


async def test_a_removed_link_is_named_and_refused_if_the_chain_must_be_complete(
    gateway: RunningGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    envelopes = [await receipt_of(gateway, (await ask(gateway))["id"]) for _ in range(5)]
    assert missing_numbers([one["receipt"] for one in envelopes]) == []
    _, _, keys = await gateway.request("GET", "/v1/receipts/keys")
    files = {"keys": json.loads(keys), "all": envelopes, "fewer": [envelopes[0], envelopes[1], envelopes[4]],
             "late": envelopes[2:]}  # fmt: skip
    paths = {name: tmp_path / f"{name}.json" for name in files}
    for name, content in files.items():
        paths[name].write_text(json.dumps(content))

    def verify(name: str, **options: Any) -> tuple[str, str]:
        verify_receipt(paths[name], str(paths["keys"]), answer=None, recompute=None, **options)
        shown = capsys.readouterr()
        return shown.out, shown.err

    out, err = verify("all", complete=True)
    assert ("receipts: 5; verified links of the chain: 5" in out, err) == (True, "")
    out, err = verify("fewer")
    assert "verified links of the chain: 2" in out
    assert "the numbers 3 to 4 are missing" in err
    for name, gap in (("fewer", "3 to 4"), ("late", "1 to 2")):
        with pytest.raises(CommandError, match=f"not complete: receipts with the numbers {gap} are missing"):
            verify(name, complete=True)
    forked = envelopes[2]["receipt"] | {"issued_at": "later"}
    with pytest.raises(InvalidReceipt, match="forks"):
        check_chain([*(one["receipt"] for one in envelopes), forked])


async def test_a_file_in_which_a_name_stands_twice_is_refused(gateway: RunningGateway, tmp_path: Path) -> None:
    envelope = await receipt_of(gateway, (await ask(gateway))["id"])
    _, _, keys = await gateway.request("GET", "/v1/receipts/keys")
    (tmp_path / "keys.json").write_bytes(keys)
    cost = '"cost_nanodollars": '
    text = json.dumps(envelope).replace(cost, f"{cost}1, {cost}", 1)
    assert json.loads(text) == envelope, "the last one counts here, and the first one elsewhere"
    (tmp_path / "receipt.json").write_text(text)
    with pytest.raises(CommandError, match="a name twice"):
        verify_receipt(tmp_path / "receipt.json", str(tmp_path / "keys.json"), answer=None, recompute=None)


HOSTILE = [
    "", "1;", "2", "1; salt=" + "0" * 31, "1; salt=" + "0" * 33, "1; salt=" + "0" * 4000, "1" * 4000,
    "1; salt=../../etc/passwd", "1; salt=" + "0" * 31 + "\xe9", "1; salt=" + "0" * 32 + "; salt=" + "1" * 32,
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
async def test_a_hostile_header_fails_its_request_alone(gateway: RunningGateway, value: str) -> None:
    headers = {"x-moiety-receipt": value}
    status, _, answer = await gateway.post(PATH, CHAT, headers=headers)
    assert (status, json.loads(answer)["error"]["code"]) == (400, "invalid_receipt_header")
    status, _, answer = await gateway.post(PATH, CHAT | {"model": "unknown"}, headers=headers)
    assert status == 404, "fails before the header is read"
    await gateway.stored_usage.flush()
    rows = (await gateway.admin("GET", "/usage/requests"))["data"]
    assert len(rows) >= 1 and all(row["outcome"] != "ok" for row in rows)
    assert json.loads((await gateway.request("GET", "/v1/receipts"))[2])["data"] == []
    await receipt_of(gateway, (await ask(gateway))["id"])


async def test_settings_of_every_type_verify(gateway: RunningGateway) -> None:
    body = CHAT | {"logit_bias": {"10": 1.5, "2": -1, "200": 0.1}, "temperature": 1e-7, "stop": ["\u0000", "é\u2028"],
                   "seed": 2**63 - 1}  # fmt: skip
    envelope = await receipt_of(gateway, (await ask(gateway, body))["id"])
    content = check_receipt(envelope, await keys_of(gateway))
    assert content["settings"]["sampling"]["logit_bias"] == {"10": 1.5, "2": -1, "200": 0.1}


async def test_without_a_database_requests_are_served_and_receipts_follow_later(gateway: RunningGateway) -> None:
    before = await ask(gateway)
    await receipt_of(gateway, before["id"])
    is_away = True

    def refuse(*_: Any) -> None:
        if is_away:
            raise sa.exc.OperationalError("SELECT", {}, ConnectionError("away"))

    engine = gateway.database.engine.sync_engine
    sa.event.listen(engine, "before_cursor_execute", refuse)
    answer = await ask(gateway)
    for target in (f"/v1/receipts/{answer['id']}", f"/v1/receipts/{before['id']}", "/v1/receipts"):
        status, _, body = await gateway.request("GET", target)
        assert status == 503, body
    is_away = False
    async with asyncio.timeout(30):
        while (await gateway.request("GET", f"/v1/receipts/{answer['id']}"))[0] != 200:  # noqa: ASYNC110  no event
            await asyncio.sleep(0.05)
    envelope = await receipt_of(gateway, answer["id"])
    content = check_receipt(envelope, await keys_of(gateway))
    assert (content["sequence"], content["commitments"] is not None) == (2, True)


def test_gateways_that_start_at_once_share_one_private_key(tmp_path: Path) -> None:
    for number in range(20):
        file = tmp_path / str(number) / "receipts.pem"
        barrier = threading.Barrier(6)

        def key_id(file: Path = file, barrier: threading.Barrier = barrier) -> str:
            barrier.wait()
            return load_signer(file).key_id

        with ThreadPoolExecutor(6) as pool:
            found = [future.result() for future in [pool.submit(key_id) for _ in range(6)]]
        assert len(set(found)) == 1
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert list(file.parent.iterdir()) == [file], "no draft is left"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "receipts.pem"
    load_signer(file)
    file.chmod(mode)
    with pytest.raises(BadReceiptKey, match=f"mode {mode:o}.*chmod 600"):
        load_signer(file)
