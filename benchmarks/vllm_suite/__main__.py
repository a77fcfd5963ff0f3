"""Run vLLM's public tests of its HTTP API against gateways of Moiety, and print what fails, with the reason.

    pip download --no-deps --no-binary vllm vllm==0.33.0
    PYTHONPATH=benchmarks python -m vllm_suite vllm-0.33.0.tar.gz [--only chat_completion]

The archive is vLLM's source distribution. Its test files are copied to a temporary folder, and vLLM is not installed.
The table and the JSON go to `benchmarks/results/vllm_suite.*`. Exits with 1 if a test fails without a known reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from vllm_suite.plugin import OUTCOMES_FILE
from vllm_suite.reasons import FILES, reason_of

HERE = Path(__file__).parent
ENTRYPOINTS = "tests/entrypoints"
RESULTS = HERE.parent / "results" / "vllm_suite.json"


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of one test. `reason` says why a failure is expected, or is empty."""

    file: str
    test: str
    outcome: str
    detail: str
    reason: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="vLLM's source distribution, vllm-VERSION.tar.gz")
    parser.add_argument("--only", default="", help="words separated by commas; run only files whose paths contain one")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="JSON file for the results; the table is written beside it as .md"
    )
    options = parser.parse_args()
    words = [word for word in options.only.split(",") if word]
    files = [file for file in FILES if not words or any(word in file for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        version = extract_tests(options.archive, files, Path(folder))
        outcomes = run_tests(Path(folder))
    table = as_markdown(outcomes, version)
    print(table)
    told = {"date": date.today().isoformat(), "vllm": version, "outcomes": [_as_json(one) for one in outcomes]}
    options.output.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n")
    options.output.with_suffix(".md").write_text(table)
    sys.exit(not outcomes or any(one.outcome == "failed" and not one.reason for one in outcomes))


def extract_tests(archive: Path, files: list[str], folder: Path) -> str:
    """Copy the test files, and the fixtures beside them, into packages under `folder`. Return vLLM's version."""
    wanted = {*files, "conftest.py", *(str(Path(file).parent / "conftest.py") for file in files)}
    with tarfile.open(archive) as source:
        for member in source:
            root, _, path = member.name.partition(f"/{ENTRYPOINTS}/")
            if path in wanted and member.isfile():
                data = source.extractfile(member)
                assert data is not None, "a file"
                target = folder / ENTRYPOINTS / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data.read())
                version = root.removeprefix("vllm-")
    for inner in (folder / "tests").rglob("*"):
        if inner.is_dir():
            (inner / "__init__.py").touch()
    (folder / "tests" / "__init__.py").touch()
    (folder / "pytest.ini").write_text("[pytest]\n")
    return version


def run_tests(folder: Path) -> list[Outcome]:
    """Return the outcomes of all tests in the folder."""
    found = folder / "outcomes.jsonl"
    found.touch()
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "vllm_suite.plugin", "tests"]
    environment = os.environ | {"PYTHONPATH": path, OUTCOMES_FILE: str(found)}
    subprocess.run(command, cwd=folder, env=environment, stdout=sys.stderr, check=False)
    return [_outcome_of(json.loads(line)) for line in found.read_text().splitlines()]


def _outcome_of(line: dict[str, Any]) -> Outcome:
    file, _, test = line["test"].partition("::")
    file = file.removeprefix(f"{ENTRYPOINTS}/")
    reason = reason_of(file, test, line["detail"]) if line["outcome"] == "failed" else ""
    return Outcome(file, test, line["outcome"], line["detail"][:300], reason)


def _as_json(outcome: Outcome) -> dict[str, str]:
    told = {"file": outcome.file, "test": outcome.test, "outcome": outcome.outcome}
    return told if outcome.outcome != "failed" else told | {"reason": outcome.reason, "detail": outcome.detail}


def as_markdown(outcomes: list[Outcome], version: str) -> str:
    """Return the table of files, and the failures by their reason."""
    lines = [
        f"vLLM {version}. Skipped tests are of vLLM's own code.",
        "",
        "| file | passed | skipped | failed |",
        "|---|---|---|---|",
    ]
    for file in dict.fromkeys(one.file for one in outcomes):
        counts = Counter(one.outcome for one in outcomes if one.file == file)
        lines.append(f"| `{file}` | {counts['passed']} | {counts['skipped']} | {counts['failed']} |")
    total = Counter(one.outcome for one in outcomes)
    lines += [f"| all | {total['passed']} | {total['skipped']} | {total['failed']} |", ""]
    failed = [one for one in outcomes if one.outcome == "failed"]
    reasons = Counter(one.reason for one in failed)
    lines += ["| reason of a failure | tests | which |", "|---|---|---|"] if failed else []
    for reason, count in reasons.most_common():
        names = sorted({f"`{one.test.partition('[')[0]}`" for one in failed if one.reason == reason})
        lines.append(f"| {reason or '**unknown**'} | {count} | {', '.join(names)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
