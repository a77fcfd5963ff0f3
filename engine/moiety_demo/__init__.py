"""The demo model, a small mixture-of-experts language model: its tasks, training, evaluation and weights."""

from importlib.resources import files
from pathlib import Path

__all__ = ["checkpoint_path"]


def checkpoint_path() -> Path:
    """Return the folder of the bundled checkpoint, in Hugging Face's format."""
    return Path(str(files(__name__).joinpath("checkpoint")))
