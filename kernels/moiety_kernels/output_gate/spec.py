"""Kinds of output gates, as data without an implementation."""

from __future__ import annotations

from typing import Literal

GateKind = Literal["sigmoid", "softplus", "gelu_tanh"]
