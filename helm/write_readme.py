"""Generator of the chart's README from its values: `python helm/write_readme.py`. A test compares the two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

CHART = Path(__file__).parent / "moiety"
INTRODUCTION = CHART / "README.head.md"
COMMENT_PREFIX = "# -- "


def readme() -> str:
    """Return the introduction, and a table of all values."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    rows = "".join(f"| `{name}` | {_shown(value)} | {description} |\n" for name, value, description in _values(text))
    head = "| value | default | description |\n|---|---|---|\n"
    return f"{INTRODUCTION.read_text(encoding='utf-8')}\n## Values\n\n{head}{rows}"


def _values(text: str) -> Iterator[tuple[str, object, str]]:
    """Yield each leaf value, with its full name and the comment above it."""
    descriptions = dict(_comments(text))
    yield from _leaves(yaml.safe_load(text), "", descriptions)


def _leaves(value: object, name: str, descriptions: dict[str, str]) -> Iterator[tuple[str, object, str]]:
    if isinstance(value, dict) and value and name not in descriptions:
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key), descriptions)
    else:
        yield name, value, descriptions.get(name, "")


def _comments(text: str) -> Iterator[tuple[str, str]]:
    path: list[tuple[int, str]] = []
    pending: list[str] = []
    for line in text.splitlines():
        words = line.strip()
        if words.startswith(COMMENT_PREFIX):
            pending = [words.removeprefix(COMMENT_PREFIX)]
        elif words.startswith("#") and pending:
            pending.append(words.removeprefix("#").strip())
        elif words and not words.startswith(("#", "-")) and ":" in words:
            depth = len(line) - len(line.lstrip())
            path = [(at, key) for at, key in path if at < depth] + [(depth, words.partition(":")[0])]
            if pending:
                yield ".".join(key for _, key in path), " ".join(pending)
            pending = []


def _shown(value: object) -> str:
    return f"`{json.dumps(value, ensure_ascii=False)}`"


if __name__ == "__main__":
    (CHART / "README.md").write_text(readme(), encoding="utf-8")
