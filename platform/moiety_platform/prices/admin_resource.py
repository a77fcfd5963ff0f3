"""Declaration of prices as an administered resource. A price has no id: its model and class identify it."""

from __future__ import annotations

from dataclasses import replace

from moiety_platform.access.actions import MANAGED_BY_OPERATORS
from moiety_platform.resources.commands import Command, Parameter, the_model
from moiety_platform.resources.declaration import Resource

_MODEL = Parameter.argument("model", "Name of the model, as /v1/models lists it.")
_CLASS = Parameter(
    name="service_class",
    flag="--class",
    help="Service class that the price is for. If not given, all classes without a price of their own, multiplied by "
    "their price factors.",
)

PRICES = Resource(
    name="price",
    help="List, set and delete prices per million tokens, by model and service class.",
    access=MANAGED_BY_OPERATORS,
    page="quotas.md",
    columns={
        "model": "model",
        "service_class": "class",
        "input": "$ per 1M input",
        "cached_input": "$ per 1M cached",
        "output": "$ per 1M output",
    },
    commands=(
        Command.list_objects("List all prices, in dollars per million tokens."),
        Command.set_object(
            "Set or change a price. It applies to requests that begin later, at every gateway within seconds.",
            replace(_MODEL, models_of=the_model),
            Parameter(
                name="input_price",
                field="input",
                flag="--input",
                help="Price of a million prompt tokens in US dollars, such as 0.15.",
                is_required=True,
            ),
            Parameter(name="output", help="Price of a million output tokens in US dollars.", is_required=True),
            Parameter(
                name="cached_input",
                help="Price of a million cached prompt tokens in US dollars. If not given, the value of --input.",
            ),
            _CLASS,
        ),
        Command.delete_object(
            "Delete a price. Requests of the model are then free of charge.",
            _MODEL.in_query(),
            _CLASS.in_query(),
        ),
    ),
    apply_kind="moiety_platform.prices.declared:PRICE",
)
