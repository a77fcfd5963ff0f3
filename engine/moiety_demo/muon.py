"""Muon: orthogonalized momentum for the matrices of the hidden layers (Jordan et al., 2024).

Updates are scaled as in Liu et al. (2025), so that one learning rate serves these matrices and AdamW's parameters.
Matrices of one shape, or of its transpose, are orthogonalized together, which many small experts need.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
UPDATE_RMS = 0.2


class Muon:
    """Optimizer that owns the momenta of its matrices; the caller sets `lr` before each step."""

    def __init__(self, matrices: Iterable[nn.Parameter], weight_decay: float, momentum: float = 0.95) -> None:
        self.lr = 0.0
        self._weight_decay = weight_decay
        self._momentum = momentum
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            short, long = sorted(matrix.shape)
            by_shape[short, long].append(matrix)
        self._groups = [
            (group, torch.zeros(len(group), *shape, device=group[0].device)) for shape, group in by_shape.items()
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters once from their gradients, which must exist."""
        for matrices, momenta in self._groups:
            gradients = torch.stack([_wide(_gradient(matrix)) for matrix in matrices])
            momenta.lerp_(gradients, 1 - self._momentum)
            updates = orthogonalize(gradients.lerp_(momenta, self._momentum))
            updates *= -self.lr * UPDATE_RMS * momenta.shape[-1] ** 0.5
            for matrix, update in zip(matrices, updates, strict=True):
                matrix.mul_(1 - self.lr * self._weight_decay)
                matrix.add_(update if matrix.shape[0] <= matrix.shape[1] else update.T)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return approximately the nearest semi-orthogonal matrices: singular values near 1.

    `matrices` [N, short, long].
    """
    a, b, c = NEWTON_SCHULZ
    x: Tensor = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _gradient(matrix: nn.Parameter) -> Tensor:
    assert matrix.grad is not None
    return matrix.grad


def _wide(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
