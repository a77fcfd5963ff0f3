"""Settings of engines that sleep while nobody needs them, and are woken by requests."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import field_validator, model_validator
from pydantic_settings import NoDecode

from moiety_platform.process_settings import ProcessSettings
from moiety_platform.reloadable import live


class WakeSettings(ProcessSettings):
    """Settings of sleeping engines and of requests that wake them."""

    wake_on_request: bool = live(
        False,
        "Whether a request for a model whose engines all sleep wakes an engine and waits for it. Otherwise it is "
        "rejected with 503.",
    )
    wake_timeout_s: float = live(
        120.0,
        "Longest time that a request waits until an engine of its model is awake, in seconds. A request that would "
        "have to wait longer is rejected with 503 and Retry-After.",
        gt=0,
        le=3600,
    )
    sleep_after_s: float = live(
        0.0,
        "Time without requests after which an engine is put into sleep mode, in seconds; 0: never. It requires "
        "wake_on_request.",
        ge=0,
    )
    stop_after_s: float = live(
        0.0,
        "Time without requests after which the gateway scales a StatefulSet of scaled_models to 0 replicas, in "
        "seconds; 0: never. It requires wake_on_request.",
        ge=0,
    )
    scaled_models: Annotated[tuple[str, ...], NoDecode] = live(
        (),
        "Models that can have no running engine, each as MODEL, whose engines an autoscaler such as KEDA starts, or as "
        "MODEL=STATEFULSET, which the gateway scales through the Kubernetes API. It requires wake_on_request.",
    )
    device_group_awake: int = live(
        1, "Largest number of engines with the same --device-group that are awake at the same time.", ge=1
    )
    device_group_min_awake_s: float = live(
        10.0,
        "Shortest time that a woken engine of a device group serves before it is put into sleep mode for another "
        "engine, in seconds. An engine without requests gives way earlier.",
        ge=0,
    )

    @field_validator("scaled_models", mode="before")
    @classmethod
    def _split_models(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("scaled_models")
    @classmethod
    def _check_models(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        models = [one.partition("=")[0] for one in value]
        if not all(models) or len(set(models)) != len(models) or any(one.endswith("=") for one in value):
            raise ValueError("write each model once, as MODEL or MODEL=STATEFULSET")
        return value

    @model_validator(mode="after")
    def _check_wake(self) -> Self:
        if (self.sleep_after_s or self.stop_after_s or self.scaled_models) and not self.wake_on_request:
            raise ValueError("sleep_after_s, stop_after_s and scaled_models require wake_on_request: set it to true")
        if self.stop_after_s and not self.scaled_statefulsets:
            raise ValueError("stop_after_s requires an entry MODEL=STATEFULSET in scaled_models")
        if 0 < self.stop_after_s < self.sleep_after_s:
            raise ValueError("stop_after_s must not be less than sleep_after_s: an engine sleeps before it is stopped")
        return self

    @property
    def scaled_statefulsets(self) -> dict[str, str]:
        """StatefulSets that the gateway scales, by model."""
        pairs = (one.partition("=") for one in self.scaled_models)
        return {model: name for model, _, name in pairs if name}

    @property
    def stopped_models(self) -> frozenset[str]:
        """Models that can have no running engine."""
        return frozenset(one.partition("=")[0] for one in self.scaled_models)
