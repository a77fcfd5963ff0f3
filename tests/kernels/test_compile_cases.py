"""Tests of the choice of variants that are compiled."""

from __future__ import annotations

from itertools import product

from moiety_kernels.gpu.cases import CompileCase, covering_cases

UP, DOWN = object(), object()


def make_case(kernel: object, x: str, has_bias: bool, rows: int = 16) -> CompileCase:
    name = f"{'up' if kernel is UP else 'down'} {x} {has_bias} {rows}"
    return CompileCase(name, kernel, {"p_x": x}, {"HAS_BIAS": has_bias, "ROWS": rows})


def test_chosen_cases_have_each_kernel_type_and_flag_in_the_order_of_the_list() -> None:
    cases = [make_case(*one) for one in product((UP, DOWN), ("*bf16", "*fp32", "*i8"), (False, True), (16, 64, 128))]
    chosen = covering_cases(cases)
    assert {case.kernel for case in chosen} == {UP, DOWN}
    assert {case.signature["p_x"] for case in chosen} == {"*bf16", "*fp32", "*i8"}
    assert {case.constants["HAS_BIAS"] for case in chosen} == {False, True}
    assert len(chosen) == 3  # of 36: as many as the argument has types
    assert chosen == [case for case in cases if case in chosen]


def test_a_kernel_is_chosen_though_others_have_all_its_values() -> None:
    cases = [make_case(UP, "*bf16", False), make_case(DOWN, "*bf16", False), make_case(UP, "*bf16", True)]
    assert {case.kernel for case in covering_cases(cases)} == {UP, DOWN}


def test_sizes_alone_make_no_further_case() -> None:
    assert len(covering_cases([make_case(UP, "*bf16", False, rows) for rows in (16, 64, 128)])) == 1
