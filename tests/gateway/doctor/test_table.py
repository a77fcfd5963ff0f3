"""Every finding of the doctor is planted by a test, and is in docs/operations.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCTOR = ROOT / "platform" / "moiety_platform" / "cli" / "doctor"
PAGE = ROOT / "docs" / "operations.md"


def complaints() -> set[str]:
    """Return the codes of all errors and warnings in the source code."""
    calls = [
        node
        for path in DOCTOR.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("fail", "warn")
    ]
    return {ast.literal_eval(call.args[1]) for call in calls}


def rows() -> dict[str, str]:
    """Return what the page's table says of each code."""
    page = PAGE.read_text(encoding="utf-8").partition("| code | fault | remedy |")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", page, re.MULTILINE))


def test_the_page_has_every_complaint_and_no_other() -> None:
    assert sorted(rows()) == sorted(complaints())


def test_every_fault_of_the_page_is_planted_by_a_test_or_marked_unplanted() -> None:
    files = [path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    tests = "".join(path.read_text(encoding="utf-8") for path in files)
    planted = {code for code in complaints() if f'"{code}"' in tests}
    assert planted == {code for code, said in rows().items() if "not covered by a test" not in said}
    assert len(planted) >= 15
