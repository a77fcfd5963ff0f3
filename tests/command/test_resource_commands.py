"""Commands made from the declarations of resources: their usage, without a gateway."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from moiety_platform.administration.catalog import RESOURCES
from moiety_platform.cli import main
from moiety_platform.cli.resource_commands import app_of
from moiety_platform.resources.declaration import Resource
from moiety_platform.webhooks.admin_resource import WEBHOOKS

from .answering_gateway import answering_gateway

WEBHOOK = {"id": "whk_1", "url": "https://example.com", "format": "json", "events": ["engine", "slo"], "pending": 0}


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command of webhooks against an answer; return what it asked, printed and noted."""

    def run(answer: Any, *args: str, resource: Resource = WEBHOOKS) -> tuple[list[tuple[str, str, bytes]], str, str]:
        with answering_gateway(lambda method: (200, answer)) as gateway:
            typer.main.get_command(app_of(resource)).main([*args, *gateway.options], standalone_mode=False)
        said = capsys.readouterr()
        return gateway.asked, said.out, said.err

    return run


def test_a_secret_is_alone_on_the_output_and_its_notice_beside_it(ask: Any) -> None:
    asked, out, err = ask({"webhook": WEBHOOK, "secret": "whsec"}, "create", "https://example.com")
    assert asked == [("POST", "/admin/v1/webhooks", b'{"url":"https://example.com"}')]
    assert (out, err) == ("whsec\n", "the secret of whk_1; it is not shown again\n")


def test_a_webhook_is_created_in_a_format_for_groups_of_events(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("0123456789abcdef\n", encoding="utf-8")
    options = ["--format", "pagerduty", "--routing-key", f"@{tmp_path / 'key'}", "--events", "engine, slo"]
    asked, _, _ = ask({"webhook": WEBHOOK, "secret": "whsec"}, "create", "https://example.com", *options)
    assert json.loads(asked[0][2]) == {
        "url": "https://example.com", "format": "pagerduty", "routing_key": "0123456789abcdef",
        "events": ["engine", "slo"],
    }  # fmt: skip


def test_a_test_delivery_shows_the_receivers_status_and_response(ask: Any) -> None:
    report = {"event_id": "evt_1", "delivered": False, "status": 404, "error": "status_404", "excerpt": "no_service"}
    asked, out, _ = ask(report, "test", "whk_1")
    assert asked == [("POST", "/admin/v1/webhooks/whk_1/test", b"")]
    for text in ("404", "status_404", "no_service"):
        assert text in out


def test_an_id_is_one_segment_of_the_path_whatever_it_contains(ask: Any) -> None:
    asked, out, _ = ask(WEBHOOK, "delete", "../tenants/a?b", "--json")
    assert asked == [("DELETE", "/admin/v1/webhooks/..%2Ftenants%2Fa%3Fb", b"")]
    assert '"whk_1"' in out


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["class", "set", "gold"], "nothing to change; give --ttft-s, --rank or another option"),
        (["class", "set", "gold", "--ttft-s", "soon"], "--ttft-s must be seconds, such as 0.5, or none, not 'soon'"),
        (["tenant", "change", "acme"], "nothing to change; give --name, --class, --weight"),
        (["key", "rotate", "k", "--grace-s", "-1"], "grace-s"),
        (["price", "set", "m", "--input", "1"], "--output"),
        (["webhook", "create", "https://e.com", "--routing-key", "@/nowhere"], "--routing-key cannot be read from"),
    ],
)
def test_wrong_usage_is_told_before_any_gateway_is_asked(
    args: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(args)
    assert ended.value.code == 2
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert complaint in told


def test_every_resource_with_commands_has_a_group_in_the_help() -> None:
    commands = main.build().commands
    for resource in RESOURCES:
        if resource.commands:
            assert commands[resource.name].help == resource.help
            assert [one.name for one in app_of(resource).registered_commands] == [one.name for one in resource.commands]


def test_a_row_is_converted_for_a_table_and_left_as_it_is_in_json(ask: Any) -> None:
    shown = replace(WEBHOOKS, plain=lambda row: {**row, "url": "converted"})
    asked, table, _ = ask({"data": [WEBHOOK]}, "list", resource=shown)
    assert [one[:2] for one in asked] == [("GET", "/admin/v1/webhooks")]
    assert "converted" in table
    assert "https://example.com" in ask({"data": [WEBHOOK]}, "list", "--json", resource=shown)[1]
