"""Tests of the choice of variants that are compiled."""

from __future__ import annotations

from itertools import product

from moiety_kernels.gpu.cases import CompileCase, covering_cases

UP, DOWN = object(), object()


def make_case(kernel: object, x: str, rows: int, warps: int) -> CompileCase:
    name = f"{'up' if kernel is UP else 'down'} {x} {rows} {warps}"
    return CompileCase(name, kernel, {"p_x": x}, {"ROWS": rows}, num_warps=warps)


def values_of(cases: list[CompileCase]) -> set[tuple[object, ...]]:
    return {
        (id(case.kernel), name, value)
        for case in cases
        for name, value in (case.signature | case.constants | {"warps": case.num_warps}).items()
    }


def test_chosen_cases_have_each_value_of_each_kernel_in_the_order_of_the_list() -> None:
    cases = [make_case(*one) for one in product((UP, DOWN), ("*bf16", "*fp32", "*i8"), (16, 64, 128), (4, 8))]
    chosen = covering_cases(cases)
    assert values_of(chosen) == values_of(cases)
    assert len(chosen) == 2 * 3  # of 36: each kernel needs as many as its argument has types
    assert chosen == [case for case in cases if case in chosen]


def test_a_value_that_one_kernel_has_does_not_stand_for_another_kernels() -> None:
    cases = [make_case(UP, "*bf16", 16, 4), make_case(DOWN, "*bf16", 16, 4), make_case(UP, "*bf16", 32, 4)]
    assert [case.kernel for case in covering_cases(cases)] == [UP, DOWN, UP]
