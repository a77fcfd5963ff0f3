"""References in the documents exist, and every page is reachable from the site's navigation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")])


class _Loader(yaml.SafeLoader):
    """Reads the configuration of MkDocs, without the functions that it names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda _loader, suffix, _node: suffix)


def pages_of(navigation: Any) -> list[str]:
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for part in parts for page in pages_of(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    configuration = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)
    listed = [page for page in pages_of(configuration["nav"]) if not page.startswith("repository/")]
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_to_files_are_of_files_that_exist(page: Path) -> None:
    links = re.findall(r"\]\((?![a-z]+:|#)([^)\s#]+)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (page.parent / link).exists()]


def test_the_packages_of_the_chart_are_of_its_version() -> None:
    chart = yaml.safe_load((ROOT / "helm" / "moiety" / "Chart.yaml").read_text())
    named = [name for page in PAGES for name in re.findall(r"moiety-[\d.]+\.tgz", page.read_text(encoding="utf-8"))]
    assert set(named) == {f"moiety-{chart['version']}.tgz"}


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_to_headings_are_of_headings_that_exist(page: Path) -> None:
    links = re.findall(r"\]\((?![a-z]+:)([^)\s#]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    targets = [
        (page.parent / file if file else page, anchor) for file, anchor in links if not file or file.endswith(".md")
    ]
    assert not [f"{target.name}#{anchor}" for target, anchor in targets if anchor not in anchors_of(target)]


def test_the_source_tree_of_the_architecture_page_has_every_package() -> None:
    tree = (DOCS / "architecture.md").read_text(encoding="utf-8").split("## Source tree")[1]
    parts = [ROOT / "platform/moiety_platform", ROOT / "engine/moiety_engine", ROOT / "engine"]
    packages = [path.parent.name for part in parts for path in sorted(part.glob("*/__init__.py"))]
    assert len(packages) > 80
    assert [name for name in packages if not re.search(rf"\b{name}/", tree)] == []


def test_the_glossary_names_code_that_exists() -> None:
    rows = [line.split("|") for line in (DOCS / "glossary.md").read_text().splitlines() if line.startswith("| ")][1:]
    named = [path for row in rows for path in re.findall(r"`((?:platform|engine|kernels|helm)/[^`]*)`", row[3])]
    assert len(named) >= len(rows) > 40
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_glossary_is_in_alphabetical_order() -> None:
    lines = (DOCS / "glossary.md").read_text().splitlines()
    terms = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:]
    assert terms == sorted(terms, key=str.casefold)
