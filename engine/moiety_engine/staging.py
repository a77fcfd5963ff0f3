"""Transfer of a step's Python values to and from the device, without waiting for the device.

With a GPU, a copy is only queued if the host's memory is page-locked; from other memory it first waits for all work on
the device. A step's uploads pass through memory that is locked once, in alternating parts: a part is rewritten after
the step that used it has been collected, since the number of steps in flight is limited. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

PART_BYTES = 1 << 20  # grows where a step needs more
_ALIGNMENT = 64

Upload = Callable[[np.ndarray], Tensor]


class Staging:
    """Uploads, downloads and completion marks. Used by the step loop's thread only."""

    def __init__(self, device: torch.device, steps_in_flight: int = 1) -> None:
        """Create the staging buffers. `steps_in_flight` steps may be launched before the next one begins."""
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._parts = [_locked(PART_BYTES) for _ in range(1 + steps_in_flight)] if self._on_cuda else []
        self._part = 0
        self._used = 0

    def begin_step(self) -> None:
        """Begin a new step: the uploads of the oldest step have arrived."""
        self._part = (self._part + 1) % max(1, len(self._parts))
        self._used = 0

    def upload(self, values: np.ndarray) -> Tensor:
        """Return the values on the device, for work queued after this. The caller must not change them any more."""
        if not self._on_cuda:
            return torch.from_numpy(values)
        return self._through_locked(values).to(self._device, non_blocking=True)

    def upload_into(self, target: Tensor, values: np.ndarray) -> None:
        """Copy the values into a tensor of their shape, whose address does not change."""
        source = self._through_locked(values) if self._on_cuda else torch.from_numpy(values)
        target.copy_(source, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        """Return the tensor in host memory, valid after a later mark has passed."""
        if not self._on_cuda:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)  # from torch's own pool of locked memory
        return host.copy_(tensor, non_blocking=True)

    def mark(self) -> DeviceMark:
        """Return a mark that passes when all work queued so far is done."""
        return DeviceMark(torch.cuda.current_stream(self._device).record_event()) if self._on_cuda else PASSED

    def _through_locked(self, values: np.ndarray) -> Tensor:
        begin = self._used
        end = begin + values.nbytes
        part = self._parts[self._part]
        if end > part.numel():
            part = self._parts[self._part] = _locked(2 * end)  # torch keeps the old one while copies read it
            begin, end = 0, values.nbytes
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        host = part[begin:end].view(torch.from_numpy(values[:0]).dtype).view(values.shape)
        np.copyto(host.numpy(), values)
        return host


class DeviceMark:
    """A point in the device's work."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def is_passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until the mark has passed; other threads may run meanwhile."""
        if self._event is not None:
            self._event.synchronize()


PASSED = DeviceMark(None)  # of work that is done


def _locked(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
