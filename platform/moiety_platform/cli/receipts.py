"""Command `moiety verify-receipt`: verify receipts without a gateway, and recompute the answer of one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import httpx
import typer

from moiety_platform.cli.errors import CommandError, Refused
from moiety_platform.cli.gateway_client import call
from moiety_platform.cli.printing import print_line
from moiety_platform.receipts.verification import (
    InvalidReceipt,
    check_chain,
    check_receipt,
    find_difference,
    first_difference,
    missing_numbers,
    public_keys_of,
    salt_of,
)

TIMEOUT_S = 600.0
ATTEMPTS, PAUSE_S = 10, 0.5
TOKEN_ID_ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
HEADER = "x-moiety-receipt"
SHOWN_GAPS = 5


def verify_receipt(
    file: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, help="File with a receipt, a list of them, or the answer of /v1/receipts."
        ),
    ],
    keys: Annotated[
        str, typer.Option(help="Public keys: the URL of the gateway, or a file with the answer of /v1/receipts/keys.")
    ],
    answer: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File with the answer, made with `return_token_ids`."),
    ] = None,
    recompute: Annotated[
        str | None, typer.Option(help="URL of a gateway that computes the answer again, of the request in --request.")
    ] = None,
    request: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File with the body of the request.")
    ] = None,
    key: Annotated[str | None, typer.Option(envvar="MOIETY_KEY", help="API key for --recompute.")] = None,
    complete: Annotated[
        bool,
        typer.Option("--complete", help="Refuse a chain that does not begin with number 1, or lacks a later number."),
    ] = False,
) -> None:
    """Verify signatures, hashes and the links of the chain; with --answer or --recompute also the tokens.

    Ends with 1 if anything does not hold.
    """
    try:
        envelopes = _envelopes(_read_json(file))
        public_keys = public_keys_of(_keys_document(keys))
        contents = [check_receipt(one, public_keys) for one in envelopes]
        num_links = check_chain(contents)
        print_line(f"signed and unchanged receipts: {len(contents)}; verified links of the chain: {num_links}")
        _check_gaps(contents, complete=complete)
        if answer is not None:
            _check_answer(_only(envelopes), _read_json(answer))
        if recompute is not None:
            if request is None or key is None:
                raise CommandError(
                    "--recompute needs the request's body in --request, and a key in --key or MOIETY_KEY"
                )
            saved = None if answer is None else _read_json(answer)
            _recompute(_only(envelopes), recompute, _read_json(request), key, public_keys, saved)
    except InvalidReceipt as exc:
        raise CommandError(str(exc)) from exc


def _check_gaps(contents: Sequence[Mapping[str, Any]], *, complete: bool) -> None:
    """Name the numbers that are missing between several receipts. Raises InvalidReceipt if there must be none."""
    missing = missing_numbers(contents)
    if not missing or not (complete or len(contents) > 1):
        return
    shown = ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]} to {one[-1]}" for one in missing[:SHOWN_GAPS])
    more = f" and {len(missing) - SHOWN_GAPS} further gaps" if len(missing) > SHOWN_GAPS else ""
    if complete:
        raise InvalidReceipt(f"the chain is not complete: receipts with the numbers {shown}{more} are missing")
    print_line(
        f"the numbers {shown}{more} are missing: of other projects of the tenant, or removed. With --complete this "
        "is an error",
        err=True,
    )


def _check_answer(envelope: Mapping[str, Any], answer: Any) -> None:
    prompts, answers = _token_ids(answer, len((envelope["receipt"]["commitments"] or {}).get("prompts", ())))
    difference = find_difference(envelope, prompts, answers)
    if difference is not None:
        raise InvalidReceipt(difference)
    print_line("the tokens of the answer are those of the receipt")


def _recompute(
    envelope: Mapping[str, Any],
    url: str,
    body: Any,
    key: str,
    public_keys: Mapping[str, bytes],
    saved: Any,
) -> None:
    """Send the request again, with the salt of the receipt, and compare both receipts. Raises InvalidReceipt."""
    content = envelope["receipt"]
    committed, salt = content["commitments"], salt_of(envelope)
    if not committed or salt is None:
        raise InvalidReceipt(f"the receipt has no commitments to compare: ask for it with the request, by {HEADER}: 1")
    sampling = content["settings"]["sampling"]
    if sampling.get("temperature", 1.0) > 0 and sampling.get("seed") is None:
        raise InvalidReceipt("the answer was sampled without a seed, so it cannot be recomputed: send `seed`")
    if not all(one["batch_invariant"] for one in content["engines"]):
        print_line(
            "the engine was not started with --batch-invariant: the same request can have another answer", err=True
        )
    if not isinstance(body, dict):
        raise CommandError("--request must have the body of the request, a JSON object")
    endpoint = content["request"]["endpoint"]
    asked = {name: value for name, value in body.items() if name not in ("stream", "stream_options", "background")}
    if endpoint in TOKEN_ID_ENDPOINTS:
        asked["return_token_ids"] = True
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) as http:
        again = call(http, "POST", endpoint, json=asked, headers={HEADER: f"1; salt={salt}"})
        found = _receipt_of(http, again["id"])
    other = check_receipt(found, {**public_keys, **_own_keys(url, public_keys)})
    _compare(content, other, saved, again)


def _receipt_of(http: httpx.Client, request_id: str) -> Any:
    """Return the receipt of a request that has just ended, at whichever gateway."""
    for _ in range(ATTEMPTS):
        try:
            return call(http, "GET", f"/v1/receipts/{quote(request_id, safe='')}")
        except Refused:  # another gateway has not stored it yet
            time.sleep(PAUSE_S)
    return call(http, "GET", f"/v1/receipts/{quote(request_id, safe='')}")


def _compare(before: Mapping[str, Any], after: Mapping[str, Any], saved: Any, again: Any) -> None:
    if before["engines"] != after["engines"]:
        raise InvalidReceipt(f"another engine computed the answer: {after['engines']}, not {before['engines']}")
    old, new = before["commitments"], after["commitments"]
    if old["prompts"] != new["prompts"]:
        raise InvalidReceipt("the prompt differs: its tokens are not those of the receipt; give the same body")
    if old["answers"] == new["answers"]:
        print_line(f"the answer was recomputed: all {after['usage']['output_tokens']} tokens are equal")
        return
    where = ""
    if saved is not None and again is not None and "choices" in again:
        for number, (one, other) in enumerate(zip(_token_ids(saved)[1], _token_ids(again)[1], strict=False)):
            position = first_difference(one, other)
            if position is not None:
                where = f": choice {number} differs from token {position} on"
                break
    raise InvalidReceipt(f"the recomputed answer is another one{where}")


def _own_keys(url: str, known: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the public keys of the gateway that recomputes, which can be another deployment."""
    return {**public_keys_of(_keys_document(url)), **known}


def _token_ids(answer: Any, num_prompts: int = 1) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of the prompts and of the choices, which are equally many for each prompt.

    Raises InvalidReceipt.
    """
    try:
        choices = sorted(answer["choices"], key=lambda one: one["index"])
        answers = [one["token_ids"] for one in choices]
        if "prompt_token_ids" in answer:
            return [answer["prompt_token_ids"]], answers
        each = max(1, len(choices) // max(1, num_prompts))
        prompts = [one["prompt_token_ids"] for one in choices[::each]]
    except (KeyError, TypeError) as exc:
        raise InvalidReceipt("the answer has no token ids: request it with `return_token_ids`, not streamed") from exc
    return prompts, answers


def _envelopes(document: Any) -> list[Mapping[str, Any]]:
    if isinstance(document, dict) and "data" in document:
        document = document["data"]
    found = document if isinstance(document, list) else [document]
    if not found or not all(isinstance(one, dict) for one in found):
        raise InvalidReceipt("the file has no receipt: save the answer of /v1/receipts/{request_id}")
    return found


def _only(envelopes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    if len(envelopes) != 1:
        raise CommandError(f"--answer and --recompute need a file with one receipt, and this one has {len(envelopes)}")
    return envelopes[0]


def _keys_document(source: str) -> Any:
    """Return the document of public keys of a file, or of a gateway by its URL."""
    if urlsplit(source).scheme not in ("http", "https"):
        path = Path(source)
        if not path.is_file():
            raise CommandError(f"--keys: {source} is neither a URL nor a file")
        return _read_json(path)
    with httpx.Client(base_url=source, timeout=TIMEOUT_S) as http:
        return call(http, "GET", "/v1/receipts/keys")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as exc:
        raise CommandError(f"{path} has no valid JSON ({exc})") from exc


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON whose names differ, because another reader can take another one of two values."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a name twice")
    return found
