"""Commands `moiety audit …`: list and verify the audit log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from moiety_platform.audit.chain import BrokenChain, verify
from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.errors import CommandError

COLUMNS = {
    "seq": "no.",
    "at": "when",
    "actor": "who",
    "actor_role": "as",
    "action": "did",
    "object_kind": "to",
    "object_id": "id",
    "change": "what",
}
DETAILS = ("actor_role", "object_kind")
PROSE = ("change",)
PAGE = 500

app = typer.Typer(no_args_is_help=True, help="Show the log of administrative changes, and verify its hash chain.")


@app.command("list")
@admin_command
def list_entries(
    admin: Admin,
    last: Annotated[int, typer.Option(min=1, help="Number of newest entries to show.")] = 50,
    object_id: Annotated[
        str | None,
        typer.Option("--object", help="Id of an object, or name of a tenant. If not given, all objects."),
    ] = None,
) -> None:
    """Show who changed what, oldest first."""
    if object_id is not None:
        named = list(admin.client.pages("/tenants", name=object_id))
        object_id = named[0]["id"] if named else object_id
    rows = list(entries(admin.client, object_id))[-last:]
    shown = rows if admin.as_json else [{**row, "change": in_words(row)} for row in rows]
    admin.show_rows(shown, COLUMNS, DETAILS, PROSE)


@app.command("verify")
@admin_command
def verify_chain(
    admin: Admin,
    expect: Annotated[
        str | None, typer.Option(help="SEQ:HASH that an earlier run printed. The log must contain this entry.")
    ] = None,
) -> None:
    """Recompute the whole hash chain locally, and compare.

    Keep the output: only it reveals a log that was cut off at its end, or rebuilt from the beginning. Ends with 1 if
    the chain is broken.
    """
    expected_seq, _, expected_hash = (expect or "").partition(":")
    seen = []

    def watched() -> Iterator[dict[str, Any]]:
        for entry in entries(admin.client, None, whole=True):
            seen.append(entry["hash"])
            yield entry

    try:
        verified = verify(watched())
    except BrokenChain as exc:
        raise CommandError(f"the audit log was tampered with: {exc}") from exc
    if expect is not None and not (
        expected_seq.isdigit() and 0 < int(expected_seq) <= len(seen) and seen[int(expected_seq) - 1] == expected_hash
    ):
        raise CommandError(f"the audit log has no entry {expect} any more: the log was truncated or replaced")
    head = f"{verified.num_entries}:{verified.head}"
    admin.show_row({"entries": verified.num_entries, "erased": verified.num_erased, "head": head})


def entries(client: AdminClient, object_id: str | None, *, whole: bool = False) -> Iterator[dict[str, Any]]:
    """Yield all entries, page by page. Raises CommandError if `whole` is set and the key does not see all entries."""
    after: int | None = 0
    while after is not None:
        page = client.get("/audit", limit=PAGE, after=after, object_id=object_id)
        if whole and not page["whole"]:
            raise CommandError("this key can read the entries of one tenant only; verify the log with an owner's key")
        yield from page["data"]
        after = page["next_after"]


def in_words(entry: dict[str, Any]) -> str:
    """Return a description of the change, field by field; for a created or deleted object, its name."""
    before, after = entry["before"], entry["after"]
    if entry["erased_at"] is not None:
        return "(erased)"
    if before is None or after is None:
        row = after or before or {}
        return str(row.get("name") or row.get("kind") or row.get("model") or "")
    return ", ".join(f"{name}: {before[name]} → {after[name]}" for name in after if before.get(name) != after[name])
