"""Mutants of kernels: edits of a kernel's source, each of which the kernel's check must notice.

A test passes `edit` to the fixture `failing_mutant`, or to `mutated`, which returns the module with that edit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import pytest

Edit = tuple[str, str]
"""Text that occurs once in the source, and its replacement in the mutant."""

FailingMutant = Callable[[ModuleType, Edit], AbstractContextManager[ModuleType]]
"""`failing_mutant(module, edit)`: a context with the mutant, in which a check of the mutant must fail."""


def mutants(replacements: Mapping[str, str]) -> pytest.MarkDecorator:
    """Run the test once an edit, passed as `edit`. `replacements` maps texts of the source to replacements."""
    edits = list(replacements.items())
    return pytest.mark.parametrize("edit", edits, ids=["-".join(edit) for edit in edits])


def mutants_by(name: str, replacements: Mapping[Any, Mapping[str, str]]) -> pytest.MarkDecorator:
    """Run the test once an edit, passed as `edit`, with the case that shows it, passed as the argument `name`."""
    rows = [
        pytest.param(case, edit, id="-".join((getattr(case, "__name__", str(case)), *edit)))
        for case, edits in replacements.items()
        for edit in edits.items()
    ]
    return pytest.mark.parametrize((name, "edit"), rows)
