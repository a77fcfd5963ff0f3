"""How long a step will take: a small regression, learned while the engine runs.

Seconds are modelled as a non-negative combination of what a step's cost is made of: a constant, its rows (with two
bends, since few rows cost what reading the weights costs, and many what multiplying costs), the context that decoding
rows read, the pairs of tokens that prefill attends to, and a constant of steps that have prompt tokens at all: those
run without what makes pure decode steps cheap, such as replayed graphs. Least squares on relative errors, with old
steps forgotten, held to a starting guess where there is no evidence. Pure Python: seven coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moiety_wire.figures import StepCosts

_BENDS = (96, 256)  # rows
_NUM_TERMS = 7
_FORGET = 0.995  # per step: the last few hundred count
_REFIT_STEPS = 8
_LEARNED_STEPS = 200  # after which what it has learned is told to others
_UNITS = (1, 100, 100, 100, 10_000, 1_000_000, 1)  # of the terms
_RIDGE = 0.05  # the guess weighs as much as this many observations of typical size


class StepShape(NamedTuple):
    """What a step's time depends on."""

    decode_rows: int = 0
    prefill_rows: int = 0
    decode_context: int = 0  # tokens whose KV decoding rows read, summed
    attended_pairs: int = 0  # (prefill token, token it attends to) pairs, summed

    def with_prefill(self, rows: int, context: int) -> StepShape:
        """With a chunk of `rows` more, after `context` tokens of its sequence."""
        return StepShape(
            self.decode_rows,
            self.prefill_rows + rows,
            self.decode_context,
            self.attended_pairs + rows * (context + rows // 2),
        )


# A guess for a machine of which nothing is known, in seconds a term's unit; a few steps teach better.
DEFAULT_COEFFICIENTS = (0.01, 0.01, 0.01, 0.01, 0.001, 0.001, 0.001)


class StepTimeModel:
    """Predicts a step's seconds from its shape; `observe` teaches it."""

    def __init__(self, coefficients: Sequence[float] = DEFAULT_COEFFICIENTS, *, bias: float = 1.0) -> None:
        """`bias` multiplies every prediction: for experiments on how much a wrong model harms."""
        if len(coefficients) != _NUM_TERMS:
            raise ValueError(f"a step-time model has {_NUM_TERMS} coefficients, not {len(coefficients)}")
        self.coefficients = [float(c) for c in coefficients]
        self._guess = list(self.coefficients)
        self._bias = bias
        self._gram = [[0.0] * _NUM_TERMS for _ in range(_NUM_TERMS)]
        self._moment = [0.0] * _NUM_TERMS
        self.num_observed = 0
        self.relative_error = 0.0  # mean absolute, of predictions made before the step was seen

    def predict_s(self, shape: StepShape) -> float:
        """Seconds that a step of this shape will take; at least a microsecond."""
        rows = shape.decode_rows + shape.prefill_rows
        return self._seconds(rows, shape.decode_context, shape.attended_pairs, has_prefill=shape.prefill_rows > 0)

    def _seconds(self, rows: int, decode_context: int, attended_pairs: int, *, has_prefill: bool) -> float:
        """The terms of `_terms` times the coefficients, written out: this is called many times a step."""
        constant, per_row, past_first, past_second, context, pairs, prefill = self.coefficients
        total = constant + per_row * (rows / 100)
        if has_prefill:
            total += prefill
        if rows > _BENDS[0]:
            total += past_first * ((rows - _BENDS[0]) / 100)
            if rows > _BENDS[1]:
                total += past_second * ((rows - _BENDS[1]) / 100)
        total += context * (decode_context / 10_000) + pairs * (attended_pairs / 1_000_000)
        return max(1e-6, total * self._bias)

    def costs(self) -> StepCosts | None:
        """What has been learned, for others; None where that is still little."""
        if self.num_observed < _LEARNED_STEPS:
            return None
        step_s, row_s, first, second, context_s, pair_s, prefill_step_s = (
            coefficient / unit for coefficient, unit in zip(self.coefficients, _UNITS, strict=True)
        )
        bends = (_BENDS[0], first), (_BENDS[1], second)
        return StepCosts(step_s, row_s, bends, context_s, pair_s, self.relative_error, prefill_step_s)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        if seconds <= 0:
            return
        terms = _terms(shape)
        predicted = sum(c * x for c, x in zip(self.coefficients, terms, strict=True))
        self.num_observed += 1
        weight = max(0.02, 1 / self.num_observed)
        self.relative_error += weight * (abs(predicted - seconds) / seconds - self.relative_error)
        if self.num_observed > 16 and not 0.2 < seconds / max(predicted, 1e-9) < 5:
            seconds = predicted * (5 if seconds > predicted else 0.2)  # a hiccup of the machine teaches little
        scale = 1 / seconds
        scaled = [x * scale for x in terms]
        for i, row in enumerate(self._gram):
            x_i = scaled[i]
            self._moment[i] = self._moment[i] * _FORGET + x_i
            for j in range(_NUM_TERMS):
                row[j] = row[j] * _FORGET + x_i * scaled[j]
        if self.num_observed % _REFIT_STEPS == 0 or self.num_observed < _REFIT_STEPS:
            self._refit()

    def largest_prefill(self, shape: StepShape, context: int, budget_s: float, limit: int) -> int:
        """The most prompt tokens, up to `limit`, that may join a step of this shape, after `context` tokens of their
        sequence, so that it is predicted to end within the budget."""
        rows, decode_context, pairs = shape.decode_rows + shape.prefill_rows, shape.decode_context, shape.attended_pairs
        low, high = 0, limit

        def predict_s(more: int) -> float:
            attended_pairs = pairs + more * (context + more // 2)
            return self._seconds(rows + more, decode_context, attended_pairs, has_prefill=True)

        if predict_s(limit) <= budget_s:
            return limit
        while low < high:
            middle = (low + high + 1) // 2
            if predict_s(middle) <= budget_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _refit(self) -> None:
        """Solve for the coefficients; those that come out negative are held at zero, and the others solved again."""
        guess = self._guess
        active = list(range(_NUM_TERMS))
        while True:
            matrix = [[self._gram[i][j] for j in active] for i in active]
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
    """Gaussian elimination of a symmetric positive definite system; both arguments are used up."""
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
        vector[i] = (vector[i] - sum(matrix[i][j] * vector[j] for j in range(i + 1, size))) / matrix[i][i]
    return vector
