"""Step-time model: a small regression, trained while the engine runs.

Seconds are modelled as a non-negative combination of cost terms: a constant, the rows (with two bends, since few rows
cost the reading of the weights, and many rows the multiplications), the context that decode rows read, the token pairs
that prefill attends to, and a constant for steps with prompt tokens, which run without the optimizations of pure decode
steps, such as captured graphs. The fit is least squares on relative errors with decay of old steps, regularized towards
an initial guess. Pure Python: seven coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import mul
from typing import NamedTuple

from moiety_wire.engine_load import StepCosts

_BENDS = (96, 256)  # rows
_NUM_TERMS = 7
_FORGET = 0.995  # decay per step: the last few hundred count
_REFIT_STEPS = 8
_LEARNED_STEPS = 200  # steps before the coefficients are reported
_UNITS = (1, 100, 100, 100, 10_000, 1_000_000, 1)  # of the terms
_RIDGE = 0.05  # the guess weighs as much as this many observations of typical size


class StepShape(NamedTuple):
    """Features of a step that determine its duration."""

    decode_rows: int = 0
    prefill_rows: int = 0
    decode_context: int = 0  # tokens whose KV decoding rows read, summed
    attended_pairs: int = 0  # (prefill token, token it attends to) pairs, summed

    def with_prefill(self, rows: int, context: int) -> StepShape:
        """Return the shape with `rows` more prefill rows, after `context` tokens of their sequence."""
        return StepShape(
            self.decode_rows,
            self.prefill_rows + rows,
            self.decode_context,
            self.attended_pairs + rows * (context + rows // 2),
        )


# Guess for an unknown machine, in seconds per unit of a term; a few steps replace it.
DEFAULT_COEFFICIENTS = (0.01, 0.01, 0.01, 0.01, 0.001, 0.001, 0.001)


class StepTimeModel:
    """Predicts a step's duration in seconds from its shape; `observe` trains it."""

    def __init__(self, coefficients: Sequence[float] = DEFAULT_COEFFICIENTS, *, bias: float = 1.0) -> None:
        """Create the model. `bias` multiplies every prediction, for experiments with a wrong model."""
        if len(coefficients) != _NUM_TERMS:
            raise ValueError(f"a step-time model has {_NUM_TERMS} coefficients, not {len(coefficients)}")
        self.coefficients = [float(c) for c in coefficients]
        self._guess = list(self.coefficients)
        self._bias = bias
        self._gram = [[0.0] * (i + 1) for i in range(_NUM_TERMS)]
        self._moment = [0.0] * _NUM_TERMS
        self._recent: list[tuple[float, ...]] = []  # scaled terms of the steps since the last fit
        self.num_observed = 0
        self.relative_error = 0.0  # mean absolute error of predictions made before the step was observed

    def predict_s(self, shape: StepShape) -> float:
        """Return the predicted seconds of a step of this shape; at least a microsecond."""
        rows = shape.decode_rows + shape.prefill_rows
        return self._seconds(rows, shape.decode_context, shape.attended_pairs, has_prefill=shape.prefill_rows > 0)

    def _seconds(self, rows: int, decode_context: int, attended_pairs: int, *, has_prefill: bool) -> float:
        """Compute `_terms` times the coefficients, written out because it is called many times per step."""
        constant, per_row, past_first, past_second, context, pairs, prefill = self.coefficients
        total = constant + per_row * (rows / 100)
        if has_prefill:
            total += prefill
        if rows > _BENDS[0]:
            total += past_first * ((rows - _BENDS[0]) / 100)
            if rows > _BENDS[1]:
                total += past_second * ((rows - _BENDS[1]) / 100)
        total += context * (decode_context / 10_000) + pairs * (attended_pairs / 1_000_000)
        total *= self._bias
        return total if total > 1e-6 else 1e-6

    def decode_costs(self) -> tuple[float, float]:
        """Return the learned seconds of a decode row, and of a token of context that it reads; not both are 0."""
        row_s, token_s = self.coefficients[1] / _UNITS[1], self.coefficients[4] / _UNITS[4]
        return (row_s, token_s) if row_s or token_s else (1.0, 0.0)

    def costs(self) -> StepCosts | None:
        """Return the learned costs; None until enough steps were observed."""
        if self.num_observed < _LEARNED_STEPS:
            return None
        step_s, row_s, first, second, context_s, pair_s, prefill_step_s = (
            coefficient / unit for coefficient, unit in zip(self.coefficients, _UNITS, strict=True)
        )
        bends = (_BENDS[0], first), (_BENDS[1], second)
        return StepCosts(step_s, row_s, bends, context_s, pair_s, self.relative_error, prefill_step_s)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Train the model with the duration of a step of this shape."""
        if seconds <= 0:
            return
        terms = _terms(shape)
        predicted = sum(map(mul, self.coefficients, terms))
        self.num_observed += 1
        weight = max(0.02, 1 / self.num_observed)
        self.relative_error += weight * (abs(predicted - seconds) / seconds - self.relative_error)
        if self.num_observed > 16 and not 0.2 < seconds / max(predicted, 1e-9) < 5:
            seconds = predicted * (5 if seconds > predicted else 0.2)  # clip outliers, such as a hiccup of the machine
        self._recent.append(tuple(map(mul, terms, repeat(1 / seconds))))
        if self.num_observed % _REFIT_STEPS == 0 or self.num_observed < _REFIT_STEPS:
            self._add_recent()
            self._refit()

    def _add_recent(self) -> None:
        """Add the steps since the last fit to the sums, each with the decay of its age."""
        decay = _FORGET ** len(self._recent)
        moment = self._moment = [decay * value for value in self._moment]
        gram = self._gram = [[decay * value for value in row] for row in self._gram]
        weight = 1.0
        for scaled in reversed(self._recent):
            present = [(i, x) for i, x in enumerate(scaled) if x]  # few terms in a step without prompt tokens
            for i, x in present:
                weighted, row = weight * x, gram[i]
                moment[i] += weighted
                for j, y in present:
                    if j > i:
                        break  # the lower half: it is symmetric
                    row[j] += weighted * y
            weight *= _FORGET
        self._recent.clear()

    def largest_prefill(self, shape: StepShape, context: int, budget_s: float, limit: int) -> int:
        """Return the largest number of prompt tokens, up to `limit`, with which the step ends within the budget.

        The tokens follow `context` tokens of their sequence and join a step of this shape.
        """
        rows, decode_context, pairs = shape.decode_rows + shape.prefill_rows, shape.decode_context, shape.attended_pairs
        low, high = 0, limit
        attended_pairs = pairs + limit * (context + limit // 2)
        if self._seconds(rows + limit, decode_context, attended_pairs, has_prefill=True) <= budget_s:
            return limit

        def predict_s(more: int) -> float:
            attended_pairs = pairs + more * (context + more // 2)
            return self._seconds(rows + more, decode_context, attended_pairs, has_prefill=True)

        while low < high:
            middle = (low + high + 1) // 2
            if predict_s(middle) <= budget_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _refit(self) -> None:
        """Solve for the coefficients; negative ones are fixed at zero, and the others are solved again."""
        guess, gram = self._guess, self._gram
        active = list(range(_NUM_TERMS))
        while True:
            matrix = [[gram[i][j] if j <= i else gram[j][i] for j in active] for i in active]
            vector = [self._moment[i] for i in active]
            for k, i in enumerate(active):
                hold = _RIDGE / max(guess[i], 1e-9) ** 2
                matrix[k][k] += hold
                vector[k] += hold * guess[i]
            solution = _solve(matrix, vector)
            negative = [i for i, value in zip(active, solution, strict=True) if value < 0]
            if not negative:
                break
            active = [i for i in active if i not in negative]
        self.coefficients = [0.0] * _NUM_TERMS
        for i, value in zip(active, solution, strict=True):
            self.coefficients[i] = value


def _terms(shape: StepShape) -> tuple[float, ...]:
    rows = shape.decode_rows + shape.prefill_rows
    return (
        1.0,
        rows / 100,
        max(0, rows - _BENDS[0]) / 100,
        max(0, rows - _BENDS[1]) / 100,
        shape.decode_context / 10_000,
        shape.attended_pairs / 1_000_000,
        1.0 if shape.prefill_rows else 0.0,
    )


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Solve a symmetric positive definite system by Gaussian elimination; both arguments are overwritten."""
    size = len(vector)
    for i in range(size):
        pivot = matrix[i][i]
        for k in range(i + 1, size):
            factor = matrix[k][i] / pivot
            if factor:
                row_k, row_i = matrix[k], matrix[i]
                for j in range(i, size):
                    row_k[j] -= factor * row_i[j]
                vector[k] -= factor * vector[i]
    for i in reversed(range(size)):
        vector[i] = (vector[i] - sum(map(mul, matrix[i][i + 1 :], vector[i + 1 :]))) / matrix[i][i]
    return vector
