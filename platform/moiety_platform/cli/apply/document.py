"""YAML file as plain data that knows the line of each part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moiety_platform.cli.errors import CommandError

ROOT = "$"


class FileError(CommandError):
    """Error in the file; the message says where, and what to do."""


@dataclass(frozen=True)
class Document:
    """Parsed file. `lines` has the line of each part, by its path such as `$.tenants[0].name`."""

    path: Path
    data: Any
    lines: dict[str, int]

    def line(self, path: str) -> int:
        """Return the line of a part, or of the closest part around it."""
        while path not in self.lines and path != ROOT:
            path = path[: max(path.rfind("."), path.rfind("["))]
        return self.lines.get(path, 1)

    def error(self, path: str, message: str) -> FileError:
        place = path.removeprefix(f"{ROOT}.")
        return FileError(f"{self.path}:{self.line(path)}: {place}: {message}")


def read_document(path: Path) -> Document:
    """Read and parse the file. Raises FileError."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as exc:
        raise FileError(f"cannot read {path}: {exc.strerror}; check the path given as --file") from exc
    except UnicodeDecodeError as exc:
        raise FileError(f"{path} is not UTF-8 text: {exc}") from exc
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark else 1
        raise FileError(f"{path}:{line}: this is not valid YAML: {exc.problem or exc.context}") from exc
    except yaml.YAMLError as exc:
        raise FileError(f"{path} is not valid YAML: {exc}") from exc
    document = Document(path, None, {})
    try:
        data = {} if node is None else _plain(node, ROOT, document)
    except (ValueError, TypeError, RecursionError) as exc:
        raise FileError(f"{path} holds a value that is not plain YAML: {exc}") from exc
    return Document(path, data, document.lines)


def _plain(node: yaml.Node, path: str, document: Document) -> Any:
    document.lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        return [_plain(one, f"{path}[{place}]", document) for place, one in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Any] = {}
        for key, value in node.value:
            inner = f"{path}.{key.value}"
            document.lines[inner] = key.start_mark.line + 1
            if key.value in found:
                raise document.error(inner, "is given twice; remove one of them")
            found[key.value] = _plain(value, inner, document)
            document.lines[inner] = key.start_mark.line + 1
        return found
    return yaml.SafeLoader("").construct_object(node)
