"""Hooks of MkDocs: add the files of the repository that pages link to.

Pages link to files outside `docs/` by relative paths, as a reader of the repository needs them. On the site those files
stand under `repository/`, and links to them are rewritten. A link to a file that does not exist fails a strict build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
FOLDER = "repository"
_LINK = re.compile(r"(\]\(|src=\"|href=\")((?:\.\./)+)([^)\"#\s]+)")
_OWN_LINK = re.compile(r"\]\((?![a-z]+:|#|/)([^)\"#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add each file that a page links to, and those that added pages link to in turn."""
    docs = Path(config["docs_dir"])
    pending = [docs / file.src_uri for file in files.documentation_pages()]
    added: set[Path] = set()
    while pending:
        page = pending.pop()
        for target in _targets(page, docs):
            if target not in added:
                added.add(target)
                uri = f"{FOLDER}/{target.relative_to(ROOT)}"
                files.append(File.generated(config, uri, abs_src_path=str(target)))
                if target.suffix == ".md":
                    pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between the pages of `docs/` and files of the repository."""
    uri = page.file.src_uri
    if uri.startswith(f"{FOLDER}/benchmarks/results/"):
        page.meta["search"] = {"exclude": True}  # tables of figures
    elif uri.startswith(FOLDER) or uri == "glossary.md":
        page.meta["search"] = {"boost": 0.25}  # the page of a term comes first
    if uri.startswith(FOLDER):
        origin = ROOT / uri.removeprefix(f"{FOLDER}/")
        return _OWN_LINK.sub(lambda found: "](" + _from_repository(origin, found[1]), markdown)
    up = "../" * uri.count("/")
    return _LINK.sub(lambda found: found[1] + up + f"{FOLDER}/" + found[3], markdown)


def _targets(page: Path, docs: Path) -> list[Path]:
    """Return the files outside `docs/` that a page links to."""
    text = page.read_text(encoding="utf-8")
    links = [found[2] + found[3] for found in _LINK.finditer(text)]
    if not page.is_relative_to(docs):
        links += [found[1] for found in _OWN_LINK.finditer(text)]
    paths = [(page.parent / link).resolve() for link in links]
    return [path for path in paths if path.is_file() and path.is_relative_to(ROOT) and not path.is_relative_to(docs)]


def _from_repository(origin: Path, link: str) -> str:
    """Return the site's link for one of a file of the repository."""
    target = (origin.parent / link).resolve()
    docs = ROOT / "docs"
    if not target.is_relative_to(docs):
        return link
    depth = len(origin.relative_to(ROOT).parts)
    return "../" * depth + str(target.relative_to(docs))
