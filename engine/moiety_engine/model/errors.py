"""Errors of a checkpoint, under the engine's CheckpointError.

ModelError
├── UnsupportedModelError   a family or feature that this engine does not run
├── ConfigError             config.json is missing, unreadable or contradicts itself
└── WeightsError            tensors are missing, unexpected or of another shape
"""

from __future__ import annotations

from moiety_engine.errors import CheckpointError


class ModelError(CheckpointError):
    """The checkpoint cannot be served as it is."""


class UnsupportedModelError(ModelError):
    """A family or feature that this engine does not run."""


class ConfigError(ModelError):
    """config.json is missing, unreadable or contradicts itself."""


class WeightsError(ModelError):
    """Tensors are missing, unexpected or of another shape."""
