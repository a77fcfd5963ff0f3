"""Commands `moiety price …`: prices of models."""

from __future__ import annotations

from typing import Annotated

import typer

from moiety_platform.cli.admin_command import Admin, admin_command

COLUMNS = {
    "model": "model",
    "service_class": "class",
    "input": "$ per 1M input",
    "cached_input": "$ per 1M cached",
    "output": "$ per 1M output",
}

app = typer.Typer(
    no_args_is_help=True, help="List, set and delete prices per million tokens, by model and service class."
)

Model = Annotated[str, typer.Argument(help="Name of the model, as /v1/models lists it.")]
ServiceClass = Annotated[
    str | None,
    typer.Option(
        "--class",
        help="Service class that the price is for. If not given, all classes without a price of their own, multiplied "
        "by their price factors.",
    ),
]


@app.command("list")
@admin_command
def list_prices(admin: Admin) -> None:
    """List all prices, in dollars per million tokens."""
    admin.show_rows(admin.client.get("/prices")["data"], COLUMNS)


@app.command("set")
@admin_command
def set_price(
    admin: Admin,
    model: Model,
    input_price: Annotated[
        str, typer.Option("--input", help="Price of a million prompt tokens in US dollars, such as 0.15.")
    ],
    output: Annotated[str, typer.Option(help="Price of a million output tokens in US dollars.")],
    cached_input: Annotated[
        str | None,
        typer.Option(help="Price of a million cached prompt tokens in US dollars. If not given, that of --input."),
    ] = None,
    service_class: ServiceClass = None,
) -> None:
    """Set a price, or change it, with effect on requests that begin later, at every gateway within seconds."""
    body = {"model": model, "input": input_price, "output": output}
    optional = {"cached_input": cached_input, "service_class": service_class}
    body |= {name: value for name, value in optional.items() if value is not None}
    admin.show_row(admin.client.call("PUT", "/prices", body))


@app.command("delete")
@admin_command
def delete_price(admin: Admin, model: Model, service_class: ServiceClass = None) -> None:
    """Delete a price. Requests of the model are then free of charge."""
    admin.show_row(admin.client.call("DELETE", "/prices", model=model, service_class=service_class))
