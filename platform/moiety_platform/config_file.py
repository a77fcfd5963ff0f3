"""The TOML or YAML configuration file of a deployment: a table per command. Knows no setting; cheap to import."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


class ConfigFileError(ValueError):
    """The configuration file is missing or malformed; the message says what to change."""


def read_config_section(path: Path, section: str | None) -> dict[str, Any]:
    """Return one top-level table, or with None the whole document. Raises ConfigFileError.

    Empty if the file has no such table.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text) if path.suffix == ".toml" else _parse_yaml(text)
    except OSError as exc:
        raise ConfigFileError(f"cannot read {path}: {exc.strerror}; check the path given as --config") from exc
    except ValueError as exc:
        raise ConfigFileError(f"{path} is not valid {'TOML' if path.suffix == '.toml' else 'YAML'}: {exc}") from exc
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigFileError(f"{path} must hold a table at the top, such as [{section or 'gateway'}]")
    if section is None:
        return document
    table = document.get(section)
    if table is not None and not isinstance(table, dict):
        raise ConfigFileError(f"{section!r} in {path} must be a table of settings")
    return dict(table or {})


def _parse_yaml(text: str) -> Any:
    import yaml  # noqa: PLC0415  imported only for YAML files

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc
