"""Commands `moiety class …`: service classes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.gateway_client import path_of

COLUMNS = {
    "name": "name",
    "rank": "rank",
    "weight": "weight",
    "ttft_s": "TTFT s",
    "ttft_per_1k_s": "+ s per 1k",
    "tpot_s": "TPOT s",
    "completion_s": "done in s",
    "max_queue_s": "longest wait s",
    "preemptible": "preemptible",
    "on_overload": "at overload",
    "downgrade_to": "falls back to",
    "price_factor": "price ×",
}
NOTHING = "none"
ROUNDED = 6  # significant digits; a table shows 0.033 s unchanged

app = typer.Typer(
    no_args_is_help=True, help="List and change service classes: their SLOs and their behaviour at overload."
)

Name = Annotated[str, typer.Argument(help="Name of the service class.")]
RankOption = Annotated[
    int | None,
    typer.Option(
        help="Priority rank. Classes of a lower rank are served first; classes of the same rank share a queue."
    ),
]
WeightOption = Annotated[
    float | None, typer.Option(help="Factor that multiplies the weights of the class's tenants within the rank.")
]
TtftOption = Annotated[
    str | None, typer.Option("--ttft-s", help="SLO for the time to first token, in seconds, or none.")
]
TtftPer1kOption = Annotated[
    float | None,
    typer.Option(
        "--ttft-per-1k-s", help="Addition to the TTFT SLO per 1,000 prompt tokens that are not cached, in seconds."
    ),
]
TpotOption = Annotated[
    str | None, typer.Option("--tpot-s", help="SLO for the time per output token, in seconds, or none.")
]
CompletionOption = Annotated[
    str | None, typer.Option("--completion-s", help="SLO for the time to the last token, in seconds, or none.")
]
MaxQueueOption = Annotated[
    float | None,
    typer.Option(
        "--max-queue-s", help="Queueing time after which a request precedes those of other classes, in seconds."
    ),
]
PreemptibleOption = Annotated[
    bool | None,
    typer.Option(
        "--preemptible/--not-preemptible", help="Allow the preemption of running requests for more urgent ones."
    ),
]
OverloadOption = Annotated[
    str | None,
    typer.Option("--on-overload", help="Action if the SLO is predicted to be missed: reject, queue or downgrade."),
]
DowngradeOption = Annotated[
    str | None,
    typer.Option("--downgrade-to", help="Class of a higher rank number that requests are downgraded to, or none."),
]
PriceOption = Annotated[
    float | None, typer.Option("--price-factor", help="Factor that multiplies prices, such as 0.5 for half the price.")
]


@app.command("list")
@admin_command
def list_classes(admin: Admin) -> None:
    """List all classes, best first."""
    rows = admin.client.get("/classes")["data"]
    admin.show_rows(rows if admin.as_json else [plain(row) for row in rows], COLUMNS)


@app.command("show")
@admin_command
def show_class(
    admin: Admin,
    name: Name,
) -> None:
    """Show one class."""
    _show(admin, admin.client.get(path_of("classes", name)))


@app.command("set")
@admin_command
def set_class(
    admin: Admin,
    name: Name,
    rank: RankOption = None,
    weight: WeightOption = None,
    ttft_s: TtftOption = None,
    ttft_per_1k_s: TtftPer1kOption = None,
    tpot_s: TpotOption = None,
    completion_s: CompletionOption = None,
    max_queue_s: MaxQueueOption = None,
    preemptible: PreemptibleOption = None,
    on_overload: OverloadOption = None,
    downgrade_to: DowngradeOption = None,
    price_factor: PriceOption = None,
) -> None:
    """Change a class, with effect at the next request, and at every gateway within seconds."""
    change = _given(
        rank=rank, weight=weight, ttft_s=_seconds("--ttft-s", ttft_s), ttft_per_1k_s=ttft_per_1k_s,
        tpot_s=_seconds("--tpot-s", tpot_s), completion_s=_seconds("--completion-s", completion_s),
        max_queue_s=max_queue_s, preemptible=preemptible, on_overload=on_overload, downgrade_to=downgrade_to,
        price_factor=price_factor,
    )  # fmt: skip
    if not change:
        raise typer.BadParameter("nothing to change; give --ttft-s, --rank or another option")
    _show(admin, admin.client.call("PATCH", path_of("classes", name), change))


@app.command("create")
@admin_command
def create_class(
    admin: Admin,
    name: Name,
    rank: Annotated[
        int,
        typer.Option(
            help="Priority rank. Classes of a lower rank are served first; classes of the same rank share a queue."
        ),
    ],
    weight: WeightOption = None,
    ttft_s: TtftOption = None,
    ttft_per_1k_s: TtftPer1kOption = None,
    tpot_s: TpotOption = None,
    completion_s: CompletionOption = None,
    max_queue_s: MaxQueueOption = None,
    preemptible: PreemptibleOption = None,
    on_overload: OverloadOption = None,
    downgrade_to: DowngradeOption = None,
    price_factor: PriceOption = None,
) -> None:
    """Create a class; it needs --ttft-s or --completion-s."""
    body = _given(
        name=name, rank=rank, weight=weight, ttft_s=_seconds("--ttft-s", ttft_s), ttft_per_1k_s=ttft_per_1k_s,
        tpot_s=_seconds("--tpot-s", tpot_s), completion_s=_seconds("--completion-s", completion_s),
        max_queue_s=max_queue_s, preemptible=preemptible, on_overload=on_overload, downgrade_to=downgrade_to,
        price_factor=price_factor,
    )  # fmt: skip
    _show(admin, admin.client.call("POST", "/classes", body))


@app.command("delete")
@admin_command
def delete_class(
    admin: Admin,
    name: Name,
) -> None:
    """Delete a class that is not shipped and that no tenant uses."""
    _show(admin, admin.client.call("DELETE", path_of("classes", name)))


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose numbers keep their small digits in a table."""
    return {
        field: f"{value:.{ROUNDED}g}" if isinstance(value, float) and value < 1000 else value
        for field, value in row.items()
    }


def _show(admin: Admin, row: dict[str, Any]) -> None:
    admin.show_row(row if admin.as_json else plain(row))


def _seconds(option: str, text: str | None) -> float | str | None:
    """Return seconds as a number, NOTHING for `none`, and None if the option was not given."""
    if text is None:
        return None
    if text.lower() == NOTHING:
        return NOTHING
    try:
        return float(text)
    except ValueError as exc:
        raise typer.BadParameter(f"{option} takes seconds, such as 0.5, or none; not {text!r}") from exc


def _given(**options: Any) -> dict[str, Any]:
    """Return the given options; `none` becomes null."""
    given = {field: value for field, value in options.items() if value is not None}
    return {field: None if value == NOTHING and field != "name" else value for field, value in given.items()}
