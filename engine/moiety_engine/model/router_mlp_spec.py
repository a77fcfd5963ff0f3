"""Specification of routers with hidden layers, independent of tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterMlpSpec:
    """Router with hidden layers of `width` values.

    `continues`: its input is the projected token plus the scaled input of the router of the layer before.
    """

    width: int
    norm_eps: float
    continues: bool
